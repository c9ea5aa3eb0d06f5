"""Time backward passes, and whole steps of each algorithm and fusion buffer size in turns; choose the fastest."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, MeasuredTimes
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.comm.gradients.fusion import FusionPlan, PlanSizes, TensorSpec
from bigbatch.comm.gradients.reducer import GradientReducer, tensor_spec
from bigbatch.tools.measure.cost_model import Backward
from bigbatch.tools.measure.sizes import elapsed_seconds
from bigbatch.tools.measure.timing import slowest
from bigbatch.trainer.machine.host import wait_for

MIN_BACKWARDS = 2
MAX_BACKWARDS = 7


def measure_backward(
    named_parameters: Mapping[str, nn.Parameter],
    forward: Callable[[], Tensor],
    communicator: Communicator,
    *,
    seconds: float,
) -> Backward:
    """Time backward without communication; return medians over some runs, of the slowest rank. Collective.

    forward computes a new loss; its gradients are added to the existing ones, as in training. A parameter without a
    gradient counts as ready when backward ends. seconds bounds the time, beyond three runs that are always made.
    """
    device, marks = communicator.device, dict[str, object]()

    def now() -> object:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # recorded on the stream, which lags behind the host
        event.record(torch.cuda.current_stream(device))
        return event

    def run() -> list[float]:
        """Run forward and backward; return the seconds of each gradient since backward's start, and of its end."""
        loss = forward()
        marks.clear()
        wait_for(device)
        start = now()
        loss.backward()
        end = now()
        wait_for(device)
        return [_between(start, each) for each in (*(marks.get(name, end) for name in named_parameters), end)]

    for parameter in named_parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: marks.update({name: now()}))
        for name, parameter in named_parameters.items()
    ]
    try:
        start = time.perf_counter()
        run()  # warm-up: allocations, and libraries' searches for kernels
        (each,) = slowest([time.perf_counter() - start], communicator.connection)
        runs = [run() for _ in range(max(MIN_BACKWARDS, min(MAX_BACKWARDS, int(seconds / each))))]
    finally:
        for hook in hooks:
            hook.remove()
    *ready, end = slowest([statistics.median(times) for times in zip(*runs, strict=True)], communicator.connection)
    return Backward(dict(zip(named_parameters, ready, strict=True)), end)


def _between(start: Any, end: Any) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3)


def in_ready_order(named_parameters: Mapping[str, nn.Parameter], backward: Backward) -> list[TensorSpec]:
    """Return the gradients in the order in which they become ready; of several ready at once, the last one first."""
    specs = [tensor_spec(name, parameter) for name, parameter in reversed(list(named_parameters.items()))]
    return sorted(specs, key=lambda spec: backward.ready_seconds[spec.name])


BUFFER_BYTES = tuple(1 << power for power in (20, 22, 24, 26, 28))
"""Sizes of fusion buffers to try: 1, 4, 16, 64 and 256 MiB, up to the size of all gradients."""
MIN_STEPS, MAX_STEPS = 3, 20
"""Steps of one candidate in one turn: in the first turn, and the most in any."""
ENOUGH_STEPS = 60
"""Steps of each candidate after which no more are measured, even if time is left."""
DROP_RATIO = 1.1
"""Candidates slower than the fastest by more than this factor, and by more than noise, get no further turn."""
MIN_GAIN = 0.002
"""Least gain that counts, as a share of a step."""


@dataclass(frozen=True)
class StepCandidate:
    """An algorithm by size, and the sizes of a fusion plan."""

    table: HybridTable
    sizes: PlanSizes

    def __str__(self) -> str:
        first = self.sizes.first_buffer_bytes
        return f"{self.table}, threshold_bytes {self.sizes.threshold_bytes}, buffer_bytes {self.sizes.buffer_bytes}" + (
            f", first_buffer_bytes {first}" if first is not None else ""
        )


Steps = Mapping[StepCandidate, MeasuredTimes]
"""The slowest rank's seconds of whole steps: forward, backward, and the exposed part of the sums."""


def make_candidates(
    stated: StepCandidate, fastest: HybridTable, tensors: Sequence[TensorSpec], *, algorithms: Sequence[str]
) -> list[StepCandidate]:
    """Return the stated candidate, then others, the most promising first; no two have the same table and plan. Pure.

    The others are buffers of BUFFER_BYTES with the fastest algorithm by size; then the stated sizes with each algorithm
    alone, because the fastest single sum need not be the fastest during a backward pass.
    """
    total = sum(tensor.num_bytes for tensor in tensors)
    filled = [size for size in BUFFER_BYTES if size < total] or [BUFFER_BYTES[0]]
    buffers = [*filled, min(4 * filled[-1], BUFFER_BYTES[-1])]
    middle = [size for size in buffers if size <= total / 4][-1:]
    tried = [
        stated,
        StepCandidate(fastest, stated.sizes),
        *(StepCandidate(fastest, PlanSizes(size, size)) for size in dict.fromkeys((*middle, *reversed(buffers)))),
        *(StepCandidate(HybridTable((HybridRow(None, name),)), stated.sizes) for name in algorithms),
    ]
    found: dict[tuple[HybridTable, FusionPlan], StepCandidate] = {}
    for each in tried:
        found.setdefault((each.table, each.sizes.plan(tensors)), each)
    return list(found.values())


def measure_steps(
    candidates: Sequence[StepCandidate],
    turn: Callable[[StepCandidate, int], list[float]],
    connection: Connection,
    *,
    step_seconds: float,
    seconds: float,
) -> Steps:
    """Time training steps of the candidates in turns; return the times of each. Collective.

    After each round clearly slower candidates are dropped, except the first one, to leave time for the close ones.
    turn: time_turn of a model. step_seconds: an estimate. Candidates without a turn in the time are not in the result.
    """
    steps: dict[StepCandidate, MeasuredTimes] = {}
    alive, count, start = list(candidates), MIN_STEPS, time.perf_counter()
    while True:
        for each in alive:
            # a turn takes a step to warm up and those that count
            slow = max((times.seconds[-1] for times in steps.values()), default=step_seconds)
            if elapsed_seconds(connection, start) + (count + 1) * slow > seconds:
                return steps
            before = steps[each].seconds if each in steps else ()
            steps[each] = MeasuredTimes((*before, *turn(each, count)))
        fastest = min((steps[each] for each in alive), key=lambda times: times.median)
        alive = [each for each in alive if each == candidates[0] or not _is_behind(steps[each], fastest)]
        if len(alive) == 1 or min(len(steps[each].seconds) for each in alive) >= ENOUGH_STEPS:
            return steps
        left = seconds - elapsed_seconds(connection, start)
        count = max(1, min(MAX_STEPS, int(left / 3 / sum(steps[each].median for each in alive)) - 1))
        alive.reverse()  # so that a drift of the machine affects all equally


def time_turn(
    named_parameters: Mapping[str, nn.Parameter],
    forward: Callable[[], Tensor],
    communicator: Communicator,
    candidate: StepCandidate,
    count: int,
    *,
    order: Sequence[str],
) -> list[float]:
    """Train without the update; return the slowest rank's seconds of each of count steps, after a warm-up step.

    order: names of the gradients, in the order in which they become ready. Collective.
    """
    for parameter in named_parameters.values():
        parameter.grad = None
    hybrid = communicator.with_algorithm("hybrid", table=candidate.table)
    reducer = GradientReducer(
        named_parameters.items(), hybrid, **asdict(candidate.sizes), order=order, weights="unchecked"
    )
    times = []
    for _ in range(count + 1):
        reducer.zero_grad()
        wait_for(communicator.device)
        start = time.perf_counter()
        forward().backward()
        reducer.wait()
        wait_for(communicator.device)
        times.append(time.perf_counter() - start)
    reducer.close()
    return slowest(times[1:], communicator.connection)


def _is_behind(one: MeasuredTimes, fastest: MeasuredTimes) -> bool:
    """Return whether one is slower by more than DROP_RATIO and noise."""
    return one.median > max(DROP_RATIO, 1 + one.joint_noise(fastest)) * fastest.median


def choose_step(steps: Steps) -> StepCandidate:
    """Return the first candidate that beats the first one beyond noise, and is within noise of the fastest.

    Without such a candidate, return the first one.
    """
    fastest, (stated, first) = min(steps.values(), key=lambda times: times.median), next(iter(steps.items()))
    for candidate, each in steps.items():
        gain, loss = first.median - each.median, each.median - fastest.median
        if gain > noise_between(each, first) and loss <= noise_between(each, fastest):
            return candidate
    return stated


def noise_between(one: MeasuredTimes, other: MeasuredTimes) -> float:
    """Return the seconds below which a difference between the two is noise."""
    return max(math.hypot(*(each.median * each.noise for each in (one, other))), MIN_GAIN * other.median)
