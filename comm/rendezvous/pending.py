"""An operation of this rank that is under way."""

from dataclasses import dataclass
from typing import TypedDict

import torch

from bigbatch.awake import awake_seconds

TensorSize = tuple[int, torch.dtype]
"""Number of elements, and dtype."""


class _Label(TypedDict):
    label: str


class OperationFacts(_Label, total=False):
    """Options of submit(): fields of the same names of Pending."""

    ranks: tuple[int, ...] | None
    size: TensorSize | None


@dataclass(frozen=True)
class Pending:
    """An operation under way. number: in order of submission. since: awake_seconds()."""

    number: int
    label: str
    since: float
    ranks: tuple[int, ...] | None = None
    """Ranks that take part; None for all."""
    size: TensorSize | None = None
    """Size of the tensor, equal on all ranks; None if the operation has no single tensor."""

    @property
    def seconds(self) -> float:
        return awake_seconds() - self.since
