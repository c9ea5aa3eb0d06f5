"""How large gradients are: counts by the power of two that each value reaches. Shares at any scale follow from them.

A value v times 2^s is below 2^p exactly where v is below 2^(p - s), so one histogram answers for every power of two.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator

FP16_LEAST = -24
"""Power of fp16's smallest number: what is below is 0, or rounded up to it."""
FP16_WHOLE = -14
"""Power of fp16's smallest number with all its digits."""
FP16_LARGEST = 65504.0
FP32_LEAST = -149


class NotFiniteError(ValueError):
    """A gradient has an infinity or NaN, in fp32."""


@dataclass(frozen=True)
class Magnitudes:
    """Holds how many values v have 2^power <= |v| < 2^(power + 1), by power, and how many are 0."""

    counts: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    largest: float = 0.0

    @property
    def nonzero(self) -> int:
        """Return the number of values that are not 0."""
        return sum(self.counts.values())

    def __add__(self, other: "Magnitudes") -> "Magnitudes":
        counts = Counter(self.counts) + Counter(other.counts)
        return Magnitudes(dict(counts), self.zeros + other.zeros, max(self.largest, other.largest))

    def lost(self, *, scale_power: int) -> float:
        """Return the share of nonzero values that are below fp16's smallest number once multiplied by the scale."""
        return self._below(FP16_LEAST - scale_power) / max(1, self.nonzero)

    def shortened(self, *, scale_power: int) -> float:
        """Return the share of all values that fp16 holds as 0 or without all digits: a report's underflow_fraction."""
        small = self.zeros + self._below(FP16_WHOLE - scale_power)
        return small / max(1, self.zeros + self.nonzero)

    def headroom(self, *, scale_power: int) -> float:
        """Return by how many powers of two the largest may grow before it overflows fp16: negative where it does."""
        return math.inf if self.largest == 0 else math.log2(FP16_LARGEST / self.largest) - scale_power

    def _below(self, power: int) -> int:
        return sum(count for each, count in self.counts.items() if each < power)


def of_all_ranks(mine: Sequence[Magnitudes], communicator: Communicator) -> list[Magnitudes]:
    """Add up what each rank has counted, in each step. Collective; the same on all ranks."""
    texts = communicator.gather_text(json.dumps([asdict(each) for each in mine]))
    ranks = [[_read(each) for each in json.loads(text)] for text in texts]
    return [sum(found, Magnitudes()) for found in zip(*ranks, strict=True)]


def _read(record: Mapping[str, Any]) -> Magnitudes:
    counts = {int(power): count for power, count in record["counts"].items()}  # JSON has no other keys than text
    return Magnitudes(counts, record["zeros"], record["largest"])


def measure(tensors: Iterable[Tensor], *, must_be_finite: bool = True) -> Magnitudes:
    """Count the values of fp32 tensors. Waits for the device. Raises: NotFiniteError.

    must_be_finite: without, such values are left out.
    """
    found = Magnitudes()
    for tensor in tensors:
        sizes = tensor.detach().abs().flatten()
        if not must_be_finite:
            sizes = sizes[sizes.isfinite()]
        largest = float(sizes.max()) if sizes.numel() else 0.0
        if not math.isfinite(largest):
            raise NotFiniteError("a gradient is not finite")
        some = sizes[sizes > 0]
        # frexp: a fraction from a half up to 1, times 2^exponent
        powers = torch.frexp(some).exponent.long() - 1
        counts = torch.bincount(powers - FP32_LEAST, minlength=1).tolist()
        by_power = {power: count for power, count in enumerate(counts, FP32_LEAST) if count}
        found += Magnitudes(by_power, sizes.numel() - some.numel(), largest)
    return found
