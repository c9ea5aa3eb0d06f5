"""Errors of a run whose loss is not finite, and of half-precision weights that diverge from their fp32 masters."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bigbatch.errors import NotFinite
from bigbatch.words import name_ranks

REMEDY = "lower schedule.base_lr or lengthen schedule.warmup_epochs"


def not_finite(loss: float, *, first_step: int, counts: Sequence[int]) -> NotFinite:
    """Return the error for a loss, summed over ranks and since first_step, that is not finite.

    counts: number of steps after first_step for which the sum of each rank alone was finite. The sum over ranks does
    not tell where it began: the rank with the fewest does.
    """
    ranks = [rank for rank, count in enumerate(counts) if count == min(counts)]
    step = first_step + min(counts) + 1
    if len(ranks) == len(counts):
        return NotFinite(f"the loss is {loss} since step {step}: {REMEDY}")
    return NotFinite(
        f"the loss is {loss} since step {step}, which began on {name_ranks(ranks)} of {len(counts)} alone: look at the "
        f"images and the GPU there, or {REMEDY}"
    )


def require_published(half: Sequence[Tensor], masters: Sequence[Tensor], *, is_updated: bool) -> None:
    """Raise ValueError if the masters were updated alone (is_updated), or half weights are not the rounded masters."""
    if is_updated:
        raise ValueError(
            "the fp32 masters were updated, but not the model's half-precision weights: call "
            "precision.update_(optimizer) instead of optimizer.step(), and precision.write_half_() after other changes"
        )
    # by their bits, as a NaN does not equal itself
    pairs = zip(half, masters, strict=True)
    if not all(weight.view(torch.int16).equal(full.to(weight.dtype).view(torch.int16)) for weight, full in pairs):
        raise ValueError(
            "the model's weights were overwritten, but not their fp32 masters, from which each update writes "
            "them: broadcast or load weights before Precision is made, or by precision.load_model_state()"
        )


def require_masters(optimizer: torch.optim.Optimizer, model: nn.Module, masters: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the optimizer updates a half-precision weight."""
    apart = {id(p) for name, p in model.named_parameters() if masters.get(name, p) is not p}
    if not apart.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the optimizer updates half-precision weights, which the masters then overwrite: give it "
            "param_groups(model, substitute=precision.masters), or precision.masters.values()"
        )
