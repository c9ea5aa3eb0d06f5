"""What tuning found, in words: the table and why. Pure."""

from collections.abc import Mapping, Sequence

from bigbatch.comm.algorithms.hybrid import Measured
from bigbatch.comm.tuning.measure import MeasuredLinks
from bigbatch.comm.tuning.plan_search import PlanChoice
from bigbatch.comm.tuning.tuner import TuningFindings


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
        f"chosen: {_verdict(f)}",
    ]
    return lines


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
