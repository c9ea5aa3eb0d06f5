"""Gradients of several microbatches in fp32, where the model's own are of half precision."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class WideAccumulation:
    """Adds up the gradients of a step's microbatches in fp32, and leaves their sum, rounded once, in the parameters.

    Half precision would round after each of them: with 256 its error is that of a flat ring of 256 ranks, eleven
    times the one of a sum in fp32 (docs/decisions/029). Takes 4 bytes per weight. Make it before the reducer: hooks run
    in the order of their making, and its own start sums over ranks. Costs nothing for no parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        self._is_last = False
        for parameter, sum_N in zip(parameters, self._sums, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(self._finish, sum_N))

    @contextmanager
    def microbatch(self, *, is_first: bool, is_last: bool) -> Iterator[None]:
        """Surround the backward of one microbatch, before which the gradients are zero."""
        self._is_last = is_last
        if is_first and self._sums:
            torch._foreach_zero_(self._sums)
        yield
        if not is_last and self._sums:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_add_(self._sums, gradients)
            # autograd adds to what is there, so half precision never holds more than one microbatch
            torch._foreach_zero_(gradients)

    def _finish(self, sum_N: Tensor, parameter: nn.Parameter) -> None:
        # within the last backward, so that a finished gradient can start on its way at once
        if self._is_last and parameter.grad is not None:
            sum_N.add_(parameter.grad)
            parameter.grad.copy_(sum_N)


def half_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List those whose gradients lose bits when many are added up."""
    return [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]
