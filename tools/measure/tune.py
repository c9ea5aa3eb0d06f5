"""Measure a cluster and a model, and choose the algorithm by size and the fusion plan for them."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from bigbatch.comm.algorithms.hybrid import HybridTable, Times
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.fusion import TensorSpec
from bigbatch.tools.measure.cost_model import Backward
from bigbatch.tools.measure.sizes import elapsed_seconds, measure_sums, sizes_up_to
from bigbatch.tools.measure.timing import MeasuredLinks, measure_links
from bigbatch.tools.measure.whole_steps import (
    StepCandidate,
    Steps,
    choose_step,
    in_ready_order,
    make_candidates,
    measure_backward,
    measure_steps,
    noise_between,
    time_turn,
)

LINKS_SHARE, BACKWARD_SHARE, STEPS_SHARE = 0.05, 0.15, 0.4
"""Shares of the time budget; the all-reduces by size get the rest."""
COMPUTING_SHARE = 1.5
"""Estimate of a step before it is measured: this factor times backward's seconds, forward included."""
NEAR = 2.0
"""An algorithm that is slower than the fastest by more than this factor is not tried in whole steps."""


@dataclass(frozen=True)
class TuneResults:
    """Results of all measurements."""

    links: MeasuredLinks
    times: Times
    backward: Backward
    tensors: tuple[TensorSpec, ...]
    """The gradients in the order in which they become ready."""
    fastest: HybridTable
    """Table from the median times of single all-reduces."""
    stated: StepCandidate
    """The config's own choice."""
    steps: Steps
    """Times of whole steps, the stated candidate first. Fewer than two if there was no time to compare."""
    doubt: str = ""
    """Why the times choose nothing; "" if they do."""

    @property
    def chosen(self) -> StepCandidate:
        """Return the choice to train with; without whole steps the fastest algorithm by size, with the stated sizes."""
        if self.doubt:
            return self.stated
        return choose_step(self.steps) if len(self.steps) > 1 else StepCandidate(self.fastest, self.stated.sizes)


def tune(
    communicator: Communicator,
    named_parameters: Mapping[str, nn.Parameter],
    forward: Callable[[], Tensor],
    *,
    stated: StepCandidate,
    seconds: float,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> TuneResults:
    """Measure links, backward, all-reduces by size, and whole steps. Collective.

    forward computes a new loss. stated: the baseline; if its algorithm hangs, the fastest table replaces it.
    seconds: approximate duration, equal on all ranks. force: choose by disturbed times, too. say: called with each line
    of results. Raises: CommError if a sum was wrong; PeerLostError.
    """
    start = time.perf_counter()
    links = measure_links(communicator, seconds=LINKS_SHARE * seconds)
    say(explain_links(links))
    backward = measure_backward(named_parameters, forward, communicator, seconds=BACKWARD_SHARE * seconds)
    tensors = in_ready_order(named_parameters, backward)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    say(f"{explain_backward(backward)}; {len(tensors)} gradients, {num_bytes / 1e6:.1f} MB")
    bytes_of: Counter[str] = Counter()
    for tensor in tensors:
        bytes_of[tensor.dtype] += tensor.num_bytes
    dtype = bytes_of.most_common(1)[0][0]
    say(f"all-reduce of {dtype}: median in ms ± two standard errors; * fastest, or within that; n repetitions:")
    say(f"{'bytes':>12}" + "".join(f"{name:>15} " for name in communicator.transport.algorithms))
    sums = measure_sums(
        communicator,
        sizes_up_to(num_bytes),
        dtype=getattr(torch, dtype),
        start=start,
        seconds=(1 - STEPS_SHARE) * seconds,
        default=stated.table.algorithms[0] if len(stated.table.algorithms) == 1 else None,
        force=force or communicator.world_size == 1,  # a single rank's sums move nothing
        say=say,
    )
    if not sums.hung.keys().isdisjoint(stated.table.algorithms):
        stated = replace(stated, table=sums.table)
        say(f"the config's own choice hangs; whole steps are compared with {stated} instead")
    say(f"algorithm by size: {sums.table}")
    if sums.times and num_bytes > max(sums.times):
        say(f"  no sum above {max(sums.times):,} bytes was measured in this time: increase --budget-seconds")
    steps: Steps = {}
    if communicator.world_size > 1:
        turn = partial(time_turn, named_parameters, forward, communicator, order=[tensor.name for tensor in tensors])
        steps = measure_steps(
            make_candidates(stated, sums.table, tensors, algorithms=near_the_fastest(sums.times)),
            turn,
            communicator.connection,
            step_seconds=COMPUTING_SHARE * backward.seconds,
            seconds=seconds - elapsed_seconds(communicator.connection, start),
        )
    doubt = sums.disturbance and f"other work disturbed the times: {sums.disturbance}"
    if not sums.times and len(steps) < 2 and not force:
        doubt = "neither sums nor whole steps were compared in this time"
    findings = TuneResults(links, sums.times, backward, tuple(tensors), sums.table, stated, steps, doubt)
    for line in explain_choice(findings):
        say(line)
    return findings


def near_the_fastest(times: Times) -> list[str]:
    """List the algorithms that take at most NEAR times the fastest's time for the largest size. Pure."""
    at_largest = times[max(times)] if times else {}
    limit = NEAR * min((measured.median for measured in at_largest.values()), default=0.0)
    return [name for name, measured in at_largest.items() if measured.median <= limit]


def explain_choice(findings: TuneResults) -> list[str]:
    """Return lines on the times of whole steps, and the choice. Pure."""
    best, stated = findings.chosen, findings.stated
    if len(findings.steps) < 2:
        return [
            f"chosen: {best}; no whole steps were compared: "
            "they need several ranks, and a larger --budget-seconds if the ranks are slow"
        ]
    lines = ["whole steps: forward, backward and sums (median of the slowest rank)"]
    for candidate, times in findings.steps.items():
        what = "as the config states: " if candidate == stated else ""
        lines.append(f"  {_ms(times.median):>9} ±{times.noise:.1%}  {what}{candidate}; n = {len(times.seconds)}")
    first, fastest = findings.steps[stated], min(findings.steps.values(), key=lambda times: times.median)
    noise = _ms(noise_between(first, fastest))
    if findings.doubt:
        lines.append(f"chosen: what the config states is kept: {findings.doubt}")
    elif best == stated:
        lines.append(
            f"chosen: what the config states is kept: {_ms(first.median)} a step, the fastest "
            f"{_ms(fastest.median)}; a gain below {noise} would be noise"
        )
    else:
        lines.append(
            f"chosen: {best}: {_ms(findings.steps[best].median)} a step, against {_ms(first.median)} as the config "
            f"states, +-{noise}"
        )
    return lines


def explain_backward(backward: Backward) -> str:
    """Return a line with the time of backward, and of its first gradient. Pure."""
    first = min(backward.ready_seconds.values(), default=0.0)
    return f"backward: {_ms(backward.seconds)}, its first gradient after {_ms(first)}"


def explain_links(links: MeasuredLinks) -> str:
    """Return a line on latency and bandwidth inside nodes and between them. Pure."""
    parts = []
    for where, hops in (("inside a node", links.inside), ("between nodes", links.across)):
        if hops is not None:
            gbit = hops.best_bytes_per_second * 8 / 1e9
            latency = f"{hops.latency_seconds * 1e6:.0f} us ±{hops.times[0][1].noise:.0%}"
            parts.append(f"{where} {latency} and {gbit:.3g} Gbit/s each way")
    return "messages: " + ("; ".join(parts) or "none between these ranks")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
