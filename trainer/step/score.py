"""Scores of outputs per image: cross-entropy or the user's loss, and the user's metrics."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

PerImage: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(logits_BK in fp32, targets: indices (B) or, after mixing, shares (B, K)) -> numbers per image."""


def cross_entropies(logits_BK: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each image (B), in nats."""
    return F.cross_entropy(logits_BK, targets, reduction="none")


def to_grid(numbers: Tensor) -> Tensor:
    """Round numbers to multiples of 2**-20, in float64: their sums are exact in any order, up to 2**33."""
    return numbers.double().mul(2.0**20).round_().mul_(2.0**-20)  # not mul_: double() does not copy float64


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluation, computed from sums over all images, each counted once."""

    values: PerImage
    """Computes (B) or (B, M) from logits and labels (B)."""
    width: int
    """M, or 1."""
    result: Callable[[Tensor], float] | None = None
    """Computes the metric from the sums (M), float64 on the CPU; None: the mean of (B) over images."""
    is_on_grid: bool = False
    """Whether values are rounded to 2**-20: sums then have the same bits for any division into ranks and batches."""

    def sums(self, logits_BK: Tensor, labels_B: Tensor, valid_B: Tensor) -> Tensor:
        """Return sums over the valid images of a batch, (M) float64."""
        values = self.values(logits_BK, labels_B)
        values_BM = (to_grid(values) if self.is_on_grid else values.double()).reshape(len(labels_B), self.width)
        return torch.where(valid_B[:, None], values_BM, 0.0).sum(0)

    def figure(self, sums_M: Tensor, *, count: int) -> float | None:
        """Return the metric; None if it is not finite, such as the share of a class without images."""
        value = float(sums_M) / count if self.result is None else float(self.result(sums_M))
        return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Score:
    """Loss and metrics of an evaluation, besides accuracy."""

    losses: PerImage = cross_entropies
    """Computes the loss of each image (B)."""
    metrics: Mapping[str, Metric] = field(default_factory=lambda: MappingProxyType({}))
    """Name -> metric."""
