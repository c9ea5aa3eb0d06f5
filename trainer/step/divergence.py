"""The error of a run whose loss is not finite."""

from collections.abc import Sequence

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
