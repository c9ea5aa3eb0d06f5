"""Sums that do not depend on order: each number becomes a multiple of a power of two, and integers add up exactly."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SUM_BITS = 62
"""Bits of int64 without the sign and one bit for rounding a limit to fp32."""
CPU_PORTION = 2**18
"""Elements of one portion, 1 MB of fp32, which stays in a CPU's cache: passes through memory cost ten times as much."""
FRACTION_BITS = 50
"""Fraction bits for gradients: the grid spacing is 2**-50, 9e-16, and the largest sum 2**12 = 4,096."""


@dataclass(frozen=True)
class Grid:
    """A fixed-point grid: rounds fp32, bf16 or fp16 numbers to multiples of its spacing, and sums these in int64.

    The spacing is 2**-fraction_bits. Each number is rounded once, by at most half the spacing, and not at all if it is
    2**(23 - fraction_bits) or more. After that a sum of integers has the same bits in any order, on any number of
    ranks. num_terms: the most numbers in one sum; each may reach 2**(62 - fraction_bits) / num_terms.
    beyond_1 (int64) counts numbers out of range: larger, infinite or NaN. If it is not given, the count is in the last
    of the sum's elements, of which there must be one more than numbers.
    Raises: ValueError if no bit is left for the numbers themselves.
    """

    num_terms: int
    fraction_bits: int = FRACTION_BITS

    def __post_init__(self) -> None:
        if self.num_terms < 1 or self.limit < 1:
            raise ValueError(f"int64 has no room for sums of {self.num_terms} numbers of {self.fraction_bits} bits")

    @property
    def limit(self) -> int:
        """Return the largest integer that a term may become."""
        return (1 << SUM_BITS) // self.num_terms

    @property
    def largest(self) -> float:
        return self.limit / 2.0**self.fraction_bits

    def add_(
        self, sums_N: Tensor, numbers_N: Tensor, *, beyond_1: Tensor | None = None, counts_2: Tensor | None = None
    ) -> None:
        """Add numbers to their sums, in place. sums_N: int64. No host sync.

        counts_2 (int64), if given, counts the numbers that became 0, and those that were not 0 before.
        """
        if beyond_1 is None:
            sums_N, beyond_1 = sums_N[:-1], sums_N[-1:]
        for some_sums_N, some_N in _portions(sums_N, numbers_N):
            # exact: a power of two changes only the exponent, and int64 holds each rounded fp32 number
            integers_N = some_N.float().mul(2.0**self.fraction_bits).round_()
            if counts_2 is not None:  # before numbers out of range are set to 0, too
                num_before, num_after = torch.count_nonzero(some_N), torch.count_nonzero(integers_N)
                counts_2 += torch.stack((num_before - num_after, num_before))
            # on a GPU always mask, since a test would wait for it; a NaN fails the comparison
            if integers_N.device.type != "cpu" or not all(abs(x) <= self.limit for x in torch.aminmax(integers_N)):
                is_beyond_N = ~(integers_N.abs() <= self.limit)  # true for NaN, too
                integers_N.masked_fill_(is_beyond_N, 0.0)
                beyond_1.add_(is_beyond_N.sum())
            some_sums_N.add_(integers_N.to(torch.int64))

    def read_(self, numbers_N: Tensor, sums_N: Tensor, *, beyond_1: Tensor | None = None) -> None:
        """Write the sums, each rounded once to the dtype of numbers_N; infinity for all if a term was out of range.

        No host sync.
        """
        if beyond_1 is None:
            sums_N, beyond_1 = sums_N[:-1], sums_N[-1:]
        for some_sums_N, some_N in _portions(sums_N, numbers_N):
            some_N.copy_(some_sums_N.float().mul_(2.0**-self.fraction_bits))
        numbers_N.masked_fill_(beyond_1 > 0, torch.inf)


def _portions(sums_N: Tensor, numbers_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both in pieces that fit a CPU's cache; as one piece on a GPU, or without elements."""
    size = CPU_PORTION if numbers_N.device.type == "cpu" else max(1, numbers_N.numel())
    if numbers_N.numel():
        yield from zip(sums_N.split(size), numbers_N.split(size), strict=True)
