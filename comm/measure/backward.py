"""Measure when, during backward, each gradient is ready to be sent."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.fusion import TensorSpec
from bigbatch.comm.gradients.reducer import tensor_spec
from bigbatch.comm.measure.cost_model import Backward
from bigbatch.comm.measure.timing import slowest

LEAST_BACKWARDS = 2
MOST_BACKWARDS = 7


def measure_backward(
    named_parameters: Mapping[str, nn.Parameter],
    forward: Callable[[], Tensor],
    communicator: Communicator,
    *,
    seconds: float,
) -> Backward:
    """Run backward some times without communication; medians over the runs, then the slowest rank's. Collective.

    forward computes a new loss; its gradients are added to the existing ones, as in training. A parameter without a
    gradient counts as ready when backward ends. seconds bounds the time, but two runs (and one to warm up) are always
    made.
    """
    for parameter in named_parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    clock = _Clock(communicator.device)
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(_mark, clock, name))
        for name, parameter in named_parameters.items()
    ]
    try:
        start = time.perf_counter()
        clock.run(forward)  # allocations, searches for algorithms
        each = max(slowest({"": [time.perf_counter() - start]}, communicator)[""])
        count = max(LEAST_BACKWARDS, min(MOST_BACKWARDS, int(seconds / each)))
        runs = [clock.run(forward) for _ in range(count)]
    finally:
        for hook in hooks:
            hook.remove()
    end = statistics.median(end for _, end in runs)
    mine = [statistics.median(marks.get(name, end) for marks, end in runs) for name in named_parameters]
    every = slowest({"": [*mine, end]}, communicator)[""]
    return Backward(dict(zip(named_parameters, every, strict=False)), every[-1])


def _mark(clock: "_Clock", name: str, parameter: nn.Parameter) -> None:
    clock.mark(name)


class _Clock:
    """Counts seconds since a backward's start: on the host, or on the GPU's stream, which runs behind it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._marks: dict[str, float | torch.cuda.Event] = {}

    def run(self, forward: Callable[[], Tensor]) -> tuple[dict[str, float], float]:
        """Run forward and backward; return the seconds of each mark, and of backward's end."""
        loss = forward()
        self._marks = {}
        if self._is_gpu:
            torch.cuda.synchronize(self._device)
        start = self._now()
        loss.backward()
        end = self._now()
        if self._is_gpu:
            torch.cuda.synchronize(self._device)
        return {name: _between(start, mark) for name, mark in self._marks.items()}, _between(start, end)

    def mark(self, name: str) -> None:
        """Note the present time; the last one counts."""
        self._marks[name] = self._now()

    def _now(self) -> "float | torch.cuda.Event":
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    return start.elapsed_time(end) / 1e3  # type: ignore[union-attr, arg-type]


def in_ready_order(named_parameters: Mapping[str, nn.Parameter], backward: Backward) -> list[TensorSpec]:
    """Order the gradients as they become ready; among those ready at once, the later parameter first."""
    specs = [tensor_spec(name, parameter) for name, parameter in reversed(list(named_parameters.items()))]
    return sorted(specs, key=lambda spec: backward.ready_seconds[spec.name])
