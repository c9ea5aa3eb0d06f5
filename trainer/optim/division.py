"""Division of work on replicated whole tensors: each rank does all of it, or (trainer/step) a part."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[list[Tensor]], list[Tensor]]
"""Maps tensors to as many results, of the same shapes."""
Finish = Callable[[], list[Tensor]]
"""Waits for the results of all tensors."""


class Division(Protocol):
    """Divides work among ranks that would all do the same."""

    def __call__(self, tensors: list[Tensor], work: Work, *, costs: list[float], dtype: torch.dtype) -> Finish:
        """Start the work on all tensors. costs: work per tensor; dtype: that of the results. Collective."""
        ...


def undivided(tensors: list[Tensor], work: Work, *, costs: list[float], dtype: torch.dtype) -> Finish:
    """Do all work on this rank."""
    results = work(tensors)
    return lambda: results
