"""What tuning found, in words: the table and why. Pure."""

from collections.abc import Mapping, Sequence

from bigbatch.comm.algorithms.hybrid import Measured
from bigbatch.comm.tuning.measure import MeasuredLinks
from bigbatch.comm.tuning.plan_search import LEAST_GAIN, PlanChoice
from bigbatch.comm.tuning.ranking import Ranking
from bigbatch.comm.tuning.tuner import TuningFindings
from bigbatch.comm.tuning.whole_steps import noise_between


def explain(findings: TuningFindings) -> list[str]:
    """Say what was chosen and why, line by line."""
    f = findings
    gradient_bytes = sum(tensor.num_bytes for tensor in f.tensors)
    first = min(f.backward.ready_seconds.values(), default=0.0)
    lines = [
        f"algorithm by size: {f.fastest}",
        "  why: fastest median at each size; no switch for a gain within the noise, nor for less than 1%",
    ]
    if gradient_bytes > max(f.times):
        lines.append(f"  above {max(f.times):,} bytes nothing was measured: the budget ended; the last slope goes on")
    lines += [
        f"backward: {_ms(f.backward.seconds)}, its first gradient after {_ms(first)}; "
        f"{len(f.tensors)} gradients, {gradient_bytes / 1e6:.1f} MB",
        f"fusion plan: {_sizes(f.searched)}",
        "  why: communication that backward does not hide, simulated from the medians above",
        f"  {_ms(f.stated.exposed_seconds):>9}  as the config states: {f.stated_table}, {_sizes(f.stated)}",
        f"  {_ms(f.stated_with_fastest.exposed_seconds):>9}  the same plan with the algorithms above",
        f"  {_ms(f.searched.exposed_seconds):>9}  those algorithms and the plan above",
        f"  {_ms(f.least_exposed_seconds):>9}  the best of all ways to cut the gradients into buffers",
    ]
    return lines


def explain_ranking(ranking: Ranking, *, count: int) -> list[str]:
    """Say what was simulated on the model of the cluster, how fast, and who is measured."""
    exposed = ", ".join(f"{name} {_ms(choice.exposed_seconds)}" for name, choice in ranking.best.items())
    rate = ranking.num_simulated / ranking.seconds
    return [
        f"simulated from these links: {ranking.num_simulated:,} steps, each fusion plan by each of "
        f"{len(ranking.best)} algorithms, in {ranking.seconds:.2f} s ({rate:,.0f} a second)",
        f"  left exposed by the best plan of each: {exposed}; measured by size: the {count} fastest of these, and what "
        "has no such model",
    ]


def explain_steps(findings: TuningFindings) -> list[str]:
    """Say what whole steps took, and what is chosen; by simulation alone where none were measured."""
    f, choice = findings, findings.measured_choice
    if choice is None:
        return [f"chosen: {_verdict(f)}"]
    lines = ["whole steps of these, measured: forward, backward and sums (median of the slowest rank)"]
    for number, step in enumerate(f.steps):
        what = f"number {number} of the simulated" if number else "as the config states"
        lines.append(
            f"  {_ms(step.measured.median):>9}  {what}: {step.candidate.table}, {_sizes(step.candidate.choice)}; "
            f"{_ms(step.candidate.choice.exposed_seconds)} exposed simulated; n = {len(step.measured.seconds)}"
        )
    stated, fastest = f.steps[0], min(f.steps, key=lambda step: step.measured.median)
    noise = _ms(noise_between(stated, fastest, LEAST_GAIN))
    medians = f"{_ms(choice.measured.median)} a step, the fastest {_ms(fastest.measured.median)}"
    if f.keeps_stated:
        return [*lines, f"chosen: what the config states is kept: {medians}; a gain below {noise} would be noise"]
    against = f"{_ms(stated.measured.median)} as the config states, +-{noise}"
    return [*lines, f"chosen: number {f.steps.index(choice)} of the simulated: {medians}, against {against}"]


def _verdict(f: TuningFindings) -> str:
    stated, searched, noise = (_ms(s) for s in (f.stated.exposed_seconds, f.searched.exposed_seconds, f.noise_seconds))
    if f.keeps_stated:
        return f"what the config states is kept: {stated}, against {searched}; a gain below {noise} would be noise"
    return f"the algorithms and the plan above: {searched}, against {stated} as the config states, +-{noise}"


def explain_links(links: MeasuredLinks) -> str:
    """Say latency and bandwidth inside nodes and between them."""
    parts = []
    for where, hops in (("inside a node", links.inside), ("between nodes", links.across)):
        if hops is not None:
            gbit = hops.best_bytes_per_second * 8 / 1e9
            parts.append(f"{where} {hops.link.latency_seconds * 1e6:.0f} us and {gbit:.3g} Gbit/s each way")
    return "messages: " + ("; ".join(parts) or "none between these ranks")


def times_head(names: Sequence[str]) -> str:
    """Write the head of times_line."""
    return f"{'bytes':>12}" + "".join(f"{name:>15}" for name in names) + "   (median in ms; * fastest, n repetitions)"


def times_line(size: int, at_size: Mapping[str, Measured], names: Sequence[str]) -> str:
    """Write one size, an algorithm a column; '-' for one that was given up."""
    best = min(at_size, key=lambda name: at_size[name].median)
    cells = {name: f"{each.median * 1e3:.3f}{'*' if name == best else ' '}" for name, each in at_size.items()}
    columns = "".join(f"{cells.get(name, '- '):>15}" for name in names)
    return f"{size:>12}{columns}   n = {max(len(each.seconds) for each in at_size.values())}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _sizes(choice: PlanChoice) -> str:
    sizes = choice.sizes
    first = f", first_buffer_bytes {sizes.first_buffer_bytes}" if sizes.first_buffer_bytes is not None else ""
    return (
        f"threshold_bytes {sizes.threshold_bytes}, buffer_bytes {sizes.buffer_bytes}{first} "
        f"= {len(choice.plan.buffers)} buffers"
    )
