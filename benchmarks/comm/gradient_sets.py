"""The gradients of a network without its arithmetic: a module with a backward that costs next to nothing."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.trainer.models import build_model

NUM_VALUES = 3
"""Number of different gradient values, so that one in a wrong place is detected."""


class Pace:
    """Sleeps like a step: forward for its time, backward until each gradient may be ready, counted from its start."""

    def __init__(self, ready_seconds: Sequence[float], *, forward_seconds: float = 0.0) -> None:
        self._ready_seconds = ready_seconds
        self._forward_seconds = forward_seconds
        self._start = 0.0
        self._stretch = 1.0

    @property
    def seconds(self) -> float:
        """Return the seconds of forward and backward."""
        return self._stretch * (self._forward_seconds + max(self._ready_seconds))

    @property
    def ready_seconds(self) -> list[float]:
        """Return the seconds of each gradient, from the start of backward."""
        return [self._stretch * each for each in self._ready_seconds]

    def take(self, seconds: float) -> None:
        """Set the seconds of forward and backward from now on."""
        self._stretch *= seconds / self.seconds

    def begin(self) -> None:
        """Sleep through forward; backward starts when this returns."""
        time.sleep(self._stretch * self._forward_seconds)
        self._start = time.perf_counter()

    def wait_for(self, index: int) -> None:
        """Sleep until gradient number index is ready."""
        time.sleep(max(0.0, self._start + self._stretch * self._ready_seconds[index] - time.perf_counter()))


class _Ready(torch.autograd.Function):
    """Passes a number on; its backward gives a parameter a gradient of one value, for any loss."""

    @staticmethod
    def forward(ctx: Any, chain_1: Tensor, parameter: Tensor, value: float, wait: Callable[[], None]) -> Tensor:
        ctx.shape, ctx.value, ctx.wait = parameter.shape, value, wait
        return chain_1.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.wait()
        return gradients[0], gradients[0].new_tensor(ctx.value).expand(ctx.shape), None, None


class CostlessModel(nn.Module):
    """Holds a real model's parameters in order; their gradients become ready in the reverse order, one after another.

    The gradient of parameter i is (1 + i % NUM_VALUES) * weight in every element. Backward only writes it, as any
    backward must, and does autograd's work for each parameter; with a pace, it also sleeps.
    """

    def __init__(self, values: Mapping[str, Tensor], *, weight: int, pace: Pace | None = None) -> None:
        super().__init__()
        self._weight = weight
        self._pace = pace
        self._ordered: list[nn.Parameter] = []
        for name, value in values.items():
            parameter = nn.Parameter(value)
            self.register_parameter(name.replace(".", "-"), parameter)
            self._ordered.append(parameter)

    def forward(self, chain_1: Tensor) -> Tensor:
        """Compute a loss from any one number that requires a gradient."""
        for i, parameter in enumerate(self._ordered):
            wait = partial(self._pace.wait_for, i) if self._pace else lambda: None
            chain_1 = _Ready.apply(chain_1, parameter, float(gradient_value(i) * self._weight), wait)
        return chain_1.sum()

    def begin(self) -> None:
        """Do the work of a step that precedes backward."""
        if self._pace:
            self._pace.begin()


def start() -> Tensor:
    """Make the number that a CostlessModel passes on."""
    return torch.zeros(1, requires_grad=True)


def gradient_value(index: int) -> int:
    """Return the value of parameter number index, before the weight."""
    return 1 + index % NUM_VALUES


def parameter_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a network's parameters, without making it."""
    with torch.device("meta"):
        network = build_model(model, num_classes=1000, norm=nn.BatchNorm2d)
    return {name: tuple(p.shape) for name, p in network.named_parameters()}


def make_values(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Make zeros that all contestants' parameters share; no code writes them, so they take no memory.

    They lie on pages that the system allocates at the first write; malloc's may be in use already.
    """
    pages = {name: mmap(-1, 4 * math.prod(each), flags=MAP_PRIVATE | MAP_ANONYMOUS) for name, each in shapes.items()}
    return {name: torch.frombuffer(pages[name], dtype=torch.float32).view(tuple(shapes[name])) for name in shapes}


def count_wrong(parameters: Iterable[nn.Parameter], *, expected: float) -> int:
    """Count parameters with a gradient other than `expected` times its value, by first, middle and last element."""
    wrong = 0
    for i, parameter in enumerate(parameters):
        assert parameter.grad is not None
        gradient_N = parameter.grad.flatten() if parameter.grad.is_contiguous() else parameter.grad.reshape(-1)
        some = gradient_N[[0, gradient_N.numel() // 2, -1]]
        wrong += bool((some != expected * gradient_value(i)).any())
    return wrong
