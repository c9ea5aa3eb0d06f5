"""Gradient values counted by power of two: one histogram gives underflow and overflow in fp16 at every loss scale.

A value v times 2^s is below 2^p exactly if v is below 2^(p - s).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from operator import add

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator

FP16_LEAST, FP16_NORMAL, FP16_OVERFLOW = -24, -14, 16
"""Exponents of fp16's smallest number, of its smallest number with all digits, and of the first power beyond it."""
FP32_LEAST, FP32_OVERFLOW = -149, 128
NUM_BINS = FP32_OVERFLOW - FP32_LEAST + 2


@dataclass(frozen=True)
class Magnitudes:
    """Counts values v: first those that are 0, then 2^p <= |v| < 2^(p + 1) for each p of fp32, last inf and NaN."""

    counts: tuple[int, ...] = (0,) * NUM_BINS

    def __add__(self, other: "Magnitudes") -> "Magnitudes":
        return Magnitudes(tuple(map(add, self.counts, other.counts)))

    def underflow(self, *, scale_power: int) -> float:
        """Return the share of values that fp16 holds as 0 or without all digits: a report's underflow_fraction."""
        return self._share_below(FP16_NORMAL - scale_power)

    def lost(self, *, scale_power: int) -> float:
        """Return the share of values that are below fp16's smallest number at this scale, but not 0 in fp32."""
        return self._share_below(FP16_LEAST - scale_power) - self._share_below(FP32_LEAST)

    def overflow(self, *, scale_power: int) -> float:
        """Return the share of values that are infinite in fp16 at this scale."""
        return 1.0 - self._share_below(FP16_OVERFLOW - scale_power) if any(self.counts) else 0.0

    def headroom(self, *, scale_power: int) -> int:
        """Return how many times all values may double before fp16 overflows; negative if it does."""
        largest = max((power for power, count in enumerate(self.counts[1:], FP32_LEAST) if count), default=FP32_LEAST)
        return FP16_OVERFLOW - scale_power - largest - 1

    def _share_below(self, power: int) -> float:
        return sum(self.counts[: power - FP32_LEAST + 1]) / max(1, sum(self.counts))


def sum_over_ranks(mine: Magnitudes, communicator: Communicator) -> Magnitudes:
    """Add up the counts of all ranks. Collective; the result is the same on all ranks."""
    texts = communicator.gather_text(json.dumps(mine.counts))
    return sum((Magnitudes(tuple(json.loads(text))) for text in texts), Magnitudes())


def measure(tensors: Iterable[Tensor]) -> Magnitudes:
    """Count the values of fp32 tensors. Waits for the device."""
    counts = torch.zeros(NUM_BINS, dtype=torch.int64)
    for tensor in tensors:
        sizes = tensor.detach().abs().flatten()
        bins = torch.frexp(sizes).exponent.long() - FP32_LEAST  # its fraction is at least 0.5: one power more than p
        bins = bins.masked_fill(sizes == 0, 0).masked_fill(~sizes.isfinite(), NUM_BINS - 1)
        counts += torch.bincount(bins, minlength=NUM_BINS).cpu()
    return Magnitudes(tuple(counts.tolist()))
