"""Measure when, during backward, each gradient is ready to be sent."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.fusion import TensorSpec
from bigbatch.comm.gradients.reducer import tensor_spec
from bigbatch.comm.measure.cost_model import Backward
from bigbatch.comm.measure.timing import slowest, wait_for

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
        run()  # allocations, searches for algorithms
        (each,) = slowest([time.perf_counter() - start], communicator)
        runs = [run() for _ in range(max(LEAST_BACKWARDS, min(MOST_BACKWARDS, int(seconds / each))))]
    finally:
        for hook in hooks:
            hook.remove()
    *ready, end = slowest([statistics.median(times) for times in zip(*runs, strict=True)], communicator)
    return Backward(dict(zip(named_parameters, ready, strict=True)), end)


def _between(start: object, end: object) -> float:
    if isinstance(start, float):
        return cast(float, end) - start
    return cast(torch.cuda.Event, start).elapsed_time(cast(torch.cuda.Event, end)) / 1e3


def in_ready_order(named_parameters: Mapping[str, nn.Parameter], backward: Backward) -> list[TensorSpec]:
    """Order the gradients as they become ready; among those ready at once, the later parameter first."""
    specs = [tensor_spec(name, parameter) for name, parameter in reversed(list(named_parameters.items()))]
    return sorted(specs, key=lambda spec: backward.ready_seconds[spec.name])
