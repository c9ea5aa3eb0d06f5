"""Whole steps of the best few choices: forward, backward and the sums of all gradients, in turns."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor, nn

from bigbatch.comm.algorithms.hybrid import HybridTable, Measured
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.tuning.measure import slowest, wait_for
from bigbatch.comm.tuning.plan_search import PlanChoice

ROUNDS = 2
"""Each has its turn so often, in the second round in reverse order, so that a drift touches all alike."""
MOST_STEPS = 20
"""Of one choice in one round."""
COMPUTING_SHARE = 1.5
"""Of backward's seconds: forward with it."""


@dataclass(frozen=True)
class Candidate:
    """An algorithm by size with a fusion plan, and what the simulation says that they leave exposed."""

    table: HybridTable
    choice: PlanChoice


@dataclass(frozen=True)
class MeasuredStep:
    """Holds the slowest rank's seconds of whole steps."""

    candidate: Candidate
    measured: Measured


def affordable(candidates: Sequence[Candidate], *, backward_seconds: float, seconds: float) -> int:
    """Say how many of the candidates, of which the first is compared with all others, there is time for; 0 or from 2.

    Each needs a step to warm up and one that counts, in each round. Pure.
    """
    spent, count = 0.0, 0
    for candidate in candidates:
        spent += 2 * ROUNDS * (COMPUTING_SHARE * backward_seconds + candidate.choice.exposed_seconds)
        if spent > seconds:
            break
        count += 1
    return count if count > 1 else 0


def measure_steps(
    candidates: Sequence[Candidate],
    named_parameters: Mapping[str, nn.Parameter],
    forward: Callable[[], Tensor],
    communicator: Communicator,
    *,
    order: Sequence[str],
    seconds: float,
) -> tuple[MeasuredStep, ...]:
    """Train with each candidate for some steps, but for the update. Collective.

    order: in which gradients become ready. seconds bounds how long it takes, but one step in each round is made anyway.
    """
    for parameter in named_parameters.values():
        parameter.grad = None
    found: list[list[float]] = [[] for _ in candidates]
    count, start = 1, time.perf_counter()
    for number in range(ROUNDS):
        turns = list(enumerate(candidates))
        for place, candidate in turns[:: -1 if number else 1]:
            hybrid = communicator.with_algorithm("hybrid", table=candidate.table)
            reducer = GradientReducer(
                named_parameters.items(), hybrid, **asdict(candidate.choice.sizes), order=order, weights="unchecked"
            )
            times = [_step(forward, reducer, communicator) for _ in range(count + 1)]
            found[place] += slowest({"": times[1:]}, communicator)[""]  # the first one warms up
            reducer.close()
            for parameter in named_parameters.values():
                parameter.grad = None
        left = seconds - max(slowest({"": [time.perf_counter() - start]}, communicator)[""])
        count = max(1, min(MOST_STEPS, int(left / sum(times[-1] for times in found)) - 1))
    return tuple(
        MeasuredStep(candidate, Measured(tuple(times))) for candidate, times in zip(candidates, found, strict=True)
    )


def _step(forward: Callable[[], Tensor], reducer: GradientReducer, communicator: Communicator) -> float:
    reducer.zero_grad()
    wait_for(communicator.device)
    start = time.perf_counter()
    forward().backward()
    reducer.wait()
    wait_for(communicator.device)
    return time.perf_counter() - start


def choose_step(steps: Sequence[MeasuredStep], *, least_gain: float) -> MeasuredStep:
    """Choose the first one that is not slower than the fastest beyond noise, and never slower than the first of all.

    least_gain: the share of a step below which a gain is worth nothing. Pure.
    """
    fastest, first = min(steps, key=_median), steps[0]
    return next(
        each
        for each in steps
        if _median(each) <= _median(first)
        and _median(each) - _median(fastest) <= noise_between(each, fastest, least_gain)
    )


def noise_between(one: MeasuredStep, other: MeasuredStep, least_gain: float) -> float:
    """Return the seconds below which a difference between the two means nothing."""
    noise = math.hypot(*(_median(each) * each.measured.noise for each in (one, other)))
    return max(noise, least_gain * _median(other))


def _median(step: MeasuredStep) -> float:
    return step.measured.median
