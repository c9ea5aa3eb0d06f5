"""Who does work on whole tensors that all ranks hold alike: each rank all of it, or (trainer/step) a share."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[list[Tensor]], list[Tensor]]
"""From tensors to as many results, of the same shapes."""
Finish = Callable[[], list[Tensor]]
"""Waits for the results of all tensors."""


class Division(Protocol):
    """Divides work among those who would all do the same."""

    def __call__(self, tensors: list[Tensor], work: Work, *, costs: list[float], dtype: torch.dtype) -> Finish:
        """Start the work on all tensors; costs says how much each takes, dtype what the results are. Collective."""
        ...


def undivided(tensors: list[Tensor], work: Work, *, costs: list[float], dtype: torch.dtype) -> Finish:
    """Do all of it here."""
    results = work(tensors)
    return lambda: results
