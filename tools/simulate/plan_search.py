"""Find the fusion plan with the least exposed communication after backward, by simulation."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from bigbatch.comm.gradients.fusion import FusionPlan, PlanSizes, TensorSpec
from bigbatch.tools.measure.cost_model import Backward, SecondsOf

NUM_BUFFER_SIZES = 64
NUM_FIRST_SIZES = 16
NUM_THRESHOLDS = 8
"""Values of each size to try: some thousand plans for ResNet-50's 161 gradients."""

MIN_GAIN = 0.002
"""Least saving, as a share of backward and exposed time, that is worth more buffers, as each costs the host some work.
"""


class PlannedTransfer(NamedTuple):
    """Time of one buffer on the wire, in seconds since backward's start."""

    num_bytes: int
    ready_seconds: float
    start_seconds: float
    end_seconds: float


def schedule_transfers(plan: FusionPlan, backward: Backward, seconds_of: SecondsOf) -> tuple[PlannedTransfer, ...]:
    """Return when each buffer of a plan is sent: in order, one at a time, each after its last gradient is ready.

    Ignores that computing and communicating may slow each other down.
    """
    transfers, free = [], 0.0
    for buffer in plan.buffers:
        ready = max(backward.ready_seconds[tensor.name] for tensor in buffer.tensors)
        start = max(ready, free)
        free = start + seconds_of(buffer.num_bytes)
        transfers.append(PlannedTransfer(buffer.num_bytes, ready, start, free))
    return tuple(transfers)


def exposed_seconds(plan: FusionPlan, backward: Backward, seconds_of: SecondsOf) -> float:
    """Return how long the update waits for communication after backward has ended."""
    transfers = schedule_transfers(plan, backward, seconds_of)
    return max(0.0, transfers[-1].end_seconds - backward.seconds) if transfers else 0.0


@dataclass(frozen=True)
class PlanChoice:
    """Sizes, their plan, and the seconds of communication that it leaves exposed."""

    sizes: PlanSizes
    plan: FusionPlan
    exposed_seconds: float


def search_plan(
    tensors: Sequence[TensorSpec], backward: Backward, seconds_of: SecondsOf, *, stated: PlanSizes | None = None
) -> PlanChoice:
    """Return the plan with the fewest buffers of those with an exposed time within MIN_GAIN of the least.

    For few gradients it tries all sizes that make a difference, else a geometric series, and the stated sizes. Raises:
    ValueError without gradients.
    """
    if not tensors:
        raise ValueError("there is no gradient to plan for")
    seconds_of = cache(seconds_of)
    sizes_from = [[t.num_bytes for t in tensors[first:]] for first in range(len(tensors))]
    # the bytes of all runs of neighbours: the only sizes at which a buffer's limit changes a plan
    runs = itertools.chain.from_iterable(map(itertools.accumulate, sizes_from))
    buffer_sizes = _thin(runs, NUM_BUFFER_SIZES)
    first_sizes = [None, *_thin(itertools.accumulate(t.num_bytes for t in tensors), NUM_FIRST_SIZES)]
    thresholds = _thin((t.num_bytes for t in tensors), NUM_THRESHOLDS)
    candidates = [
        PlanSizes(threshold, buffer, first)
        for buffer in buffer_sizes
        for first in first_sizes
        # a first buffer as large as the others is the plan of None again
        if first is None or first < buffer
        for threshold in thresholds
    ]
    plans = [(sizes, sizes.plan(tensors)) for sizes in (*candidates, *([stated] if stated else ()))]
    choices = [PlanChoice(sizes, plan, exposed_seconds(plan, backward, seconds_of)) for sizes, plan in plans]
    best = min(c.exposed_seconds for c in choices)
    good = best + MIN_GAIN * (backward.seconds + best)
    return min(
        (c for c in choices if c.exposed_seconds <= good),
        # among equals the largest threshold: it sends the fewest gradients alone
        key=lambda c: (len(c.plan.buffers), c.exposed_seconds, -c.sizes.threshold_bytes),
    )


def _thin(values: Iterable[int], count: int) -> list[int]:
    """Keep at most count of the values, the smallest and largest among them, the others near a geometric series."""
    ordered = sorted(set(values))
    if len(ordered) <= count:
        return ordered
    ratio = (ordered[-1] / ordered[0]) ** (1 / (count - 1))
    wanted = [ordered[0] * ratio**i for i in range(count)]
    return sorted({min(ordered, key=lambda v: abs(v - want)) for want in wanted[:-1]} | {ordered[-1]})
