"""One rank of a job in which the processor of a rank changes its own gradients: `FIRST HOW_MANY COMMAND ...`.

Backward computes wrongly from its call FIRST on, counted from 1 over the steps and what is computed again.
"""

from collections.abc import Callable

import torch
from forked_ranks import bigbatch
from torch import Tensor

from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.step.plan import Parts, Plan

BIT = 1 << 12
"""A bit of an fp32's mantissa: flipping it changes no gradient by more than a thousandth."""


def main(first: str, how_many: str, *command: str) -> int:
    """bigbatch, where the processor of rank 1 is faulty."""
    if read_process_env().rank == 1:
        miscompute(first=int(first), how_many=int(how_many))
    return bigbatch(*command)


def not_finite(ranks: str, first: str, how_many: str, *command: str) -> int:
    """bigbatch, where these ranks, such as 0,1, compute a number that is not finite."""
    if str(read_process_env().rank) in ranks.split(","):
        miscompute(first=int(first), how_many=int(how_many), change_=set_nan_)
    return bigbatch(*command)


def flip_(gradient: Tensor) -> None:
    gradient.view(torch.int32)[0, 0] ^= BIT


def set_nan_(gradient: Tensor) -> None:
    gradient[0, 0] = torch.nan


def miscompute(*, first: int, how_many: int, change_: Callable[[Tensor], object] = flip_) -> None:
    """Change the gradient of linear.weight in so many calls of backward."""
    healthy, calls = TrainStep.__init__, 0

    def wrong(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if not first <= calls < first + how_many:
            return gradient
        changed = gradient.clone()
        change_(changed)
        return changed

    def faulty(train_step: TrainStep, plan: Plan, parts: Parts) -> None:
        healthy(train_step, plan, parts)
        # before the hooks that digest gradients, which then see what backward returned
        dict(parts.model.named_parameters())["linear.weight"].register_hook(wrong)

    TrainStep.__init__ = faulty  # type: ignore[method-assign]
