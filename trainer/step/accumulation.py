"""Accumulate the half-precision gradients of several microbatches in fp32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class WideAccumulation:
    """Adds up the gradients of a step's microbatches in fp32, and leaves their sum, rounded once, in the parameters.

    Half precision would round after each microbatch: with 256 its error is that of a flat ring of 256 ranks, eleven
    times that of a sum in fp32 (docs/decisions/029). Takes 4 bytes per weight, nothing without parameters. Construct it
    before the reducer: hooks run in the order of registration, and the reducer's hooks start sums over ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._sums = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}
        self._unfinished: set[nn.Parameter] = set()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._finish) for parameter in parameters]

    def close(self) -> None:
        """Remove the hooks, and free the sums."""
        for hook in self._hooks:
            hook.remove()
        self._sums = {}

    def start_over(self) -> None:
        if self._sums:
            torch._foreach_zero_(list(self._sums.values()))

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Context of one microbatch's backward, before which the gradients must be zero."""
        self._unfinished = set(self._sums) if is_last else set()
        yield
        if is_last:
            for parameter in tuple(self._unfinished):  # this backward did not use them, but earlier ones may have
                if parameter.grad is not None:
                    # not in place: the reducer takes a new gradient, and refuses one that changes after backward
                    parameter.grad = self._sums[parameter].to(parameter.dtype)
            return
        used = [(sum_N, parameter.grad) for parameter, sum_N in self._sums.items() if parameter.grad is not None]
        if used:
            sums, gradients = zip(*used, strict=True)
            torch._foreach_add_(sums, gradients)
            # autograd adds to what is there, so half precision never holds more than one microbatch
            torch._foreach_zero_(gradients)

    def _finish(self, parameter: nn.Parameter) -> None:
        # within the last backward, so that the reducer can send a finished gradient at once
        if parameter in self._unfinished and parameter.grad is not None:
            self._unfinished.discard(parameter)
            parameter.grad.copy_(self._sums[parameter].add_(parameter.grad))


def half_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters with half-precision gradients, which lose bits when many are added."""
    return [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]


def accumulate_wide(model: nn.Module) -> WideAccumulation | None:
    """Return what adds up a model's gradients in half precision; None if it has none."""
    half = half_parameters(model)
    return WideAccumulation(half) if half else None
