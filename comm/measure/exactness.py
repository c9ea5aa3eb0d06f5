"""Errors of a sum over ranks: drawn numbers with a known exact sum, and the comparison with it. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.comm.gradients.grid import FRACTION_BITS, SUM_BITS, Grid

SCALES, SPREAD = 24, 8
"""Number of powers of two for an element's size, and for each rank's number below it."""
PORTION = 1 << 20
"""Elements that are drawn or compared at a time."""
WORD = (1 << 32) - 1
SCALE_KEY, RANK_KEY = 0x5EED, 0x9E3779B1


@dataclass(frozen=True)
class Precision:
    """How fp32 numbers are summed: in fp32, over a narrower wire, or as whole numbers on Grid."""

    name: str
    wire_dtype: str | None = None
    on_grid: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype handed to the all-reduce."""
        return torch.int64 if self.on_grid else torch.float32

    @property
    def travels_as(self) -> torch.dtype:
        """Return the dtype that the backend must be able to sum."""
        wire: torch.dtype = getattr(torch, self.wire_dtype) if self.wire_dtype else self.dtype
        return wire


PRECISIONS = {
    each.name: each
    for each in (
        Precision("fp32"),
        Precision("bf16-wire", "bfloat16"),
        Precision("fp16-wire", "float16"),
        Precision("grid", on_grid=True),
    )
}


def draw(start: int, stop: int, *, rank: int, seed: int, device: torch.device) -> Tensor:
    """Draw a rank's numbers for elements start to stop: fp32 of either sign, from 2**-31 to 1 in size.

    They depend on seed, rank and element alone. An element's size is drawn for all ranks together, like a weight's
    gradients, from 2**-23 to 1, and each rank's number below it by up to 2**-8: so float64 adds those of 4,000,000
    ranks without rounding.
    """
    place_N = _mixed(torch.arange(start, stop, dtype=torch.int64, device=device) & WORD)
    scale_N = _mixed(place_N ^ _key(seed, SCALE_KEY)) % SCALES
    own_N = _mixed(place_N ^ _key(seed, RANK_KEY + rank))
    exponent_N = scale_N + (own_N >> 24) % SPREAD
    bits_N = ((126 - exponent_N) << 23) | (own_N & ((1 << 23) - 1))
    return bits_N.to(torch.int32).view(torch.float32) * (1 - 2 * ((own_N >> 23) & 1))


def _key(seed: int, purpose: int) -> int:
    return int(_mixed(_mixed(torch.tensor(seed & WORD)) ^ (purpose & WORD)))


def _mixed(words_N: Tensor) -> Tensor:
    """Mix the bits of 32-bit words, in int64, so that products do not overflow."""
    for _ in range(2):
        words_N = ((words_N >> 16) ^ words_N) * 0x45D9F3B & WORD
    return (words_N >> 16) ^ words_N


def grid_for(num_ranks: int) -> Grid:
    """Make the grid of gradients, with fewer steps only if thousands of ranks leave no room for them."""
    return Grid(num_ranks, fraction_bits=min(FRACTION_BITS, SUM_BITS - (num_ranks - 1).bit_length()))


def part_of(count: int, *, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the range of elements that a rank compares: all ranks together compare each one once."""
    return rank * count // num_ranks, (rank + 1) * count // num_ranks


@dataclass(frozen=True)
class Reference:
    """The exact sums of elements from start on."""

    start: int
    num_ranks: int
    exact_S: Tensor
    """float64, without rounding."""
    magnitude_S: Tensor
    """Sum of magnitudes, float64."""
    on_grid_S: Tensor
    """Result that Grid must read, in fp32, to the bit."""

    def portions(self) -> "Iterator[Reference]":
        """Cut into parts that take little memory to compare."""
        for at in range(0, len(self.exact_S), PORTION):
            part = slice(at, at + PORTION)
            yield Reference(
                self.start + at, self.num_ranks, self.exact_S[part], self.magnitude_S[part], self.on_grid_S[part]
            )


def make_reference(start: int, stop: int, *, num_ranks: int, seed: int, device: torch.device) -> Reference:
    """Add up the numbers of all ranks for elements start to stop."""
    exact_S, magnitude_S = torch.zeros(2, stop - start, dtype=torch.float64, device=device)
    steps_S = torch.zeros(stop - start, dtype=torch.int64, device=device)
    steps = 2.0 ** grid_for(num_ranks).fraction_bits
    for at in range(start, stop, PORTION):
        part = slice(at - start, min(at + PORTION, stop) - start)
        for rank in range(num_ranks):
            numbers_S = draw(at, min(at + PORTION, stop), rank=rank, seed=seed, device=device).double()
            exact_S[part] += numbers_S
            magnitude_S[part] += numbers_S.abs()
            steps_S[part] += (numbers_S * steps).round().to(torch.int64)
    return Reference(start, num_ranks, exact_S, magnitude_S, steps_S.float() / steps)


def bound(reference: Reference, precision: Precision) -> Tensor:
    """Compute how far each sum may be from the exact one, as float64.

    fp32: one rounding per rank, each by 2**-24 of what it rounds, which is at most the sum of magnitudes and the
    roundings before. A narrower wire rounds once more per rank, by half its eps, or half its smallest number, and its
    packing takes three roundings in fp32. On the grid: half a step per rank, and one rounding of the sum.
    """
    num_ranks = reference.num_ranks
    own = torch.finfo(torch.float32).eps / 2
    if precision.on_grid:
        steps = num_ranks / 2 * 2.0 ** -grid_for(num_ranks).fraction_bits
        return steps + (reference.exact_S.abs() + steps) * own
    roundings, least = num_ranks * math.log1p(own), 0.0
    if precision.wire_dtype:
        wire = torch.finfo(precision.travels_as)
        roundings += num_ranks * math.log1p(wire.eps / 2) + 3 * math.log1p(own)
        least = num_ranks * wire.smallest_normal * wire.eps / 2
    factor = math.expm1(roundings)
    return factor * reference.magnitude_S + least * (1 + factor)


def ulps(exact_S: Tensor) -> Tensor:
    """Compute units in the last place of fp32 at each exact sum: from the nearest fp32 to the next larger in size."""
    nearest_S = exact_S.float().abs()
    return torch.nextafter(nearest_S, torch.full_like(nearest_S, torch.inf)).double() - nearest_S.double()


@dataclass(frozen=True)
class Beyond:
    """An element that is too far from the exact sum."""

    element: int
    got: float
    exact: float
    bound: float


@dataclass(frozen=True)
class Errors:
    """The errors of some elements of a sum."""

    num_elements: int = 0
    largest_ulp: float = 0.0
    total_ulp: float = 0.0
    num_off: int = 0
    """Elements that differ from the exact sum, rounded once to fp32, in a bit."""
    bound_share: float = 0.0
    """Largest of error / bound."""
    num_beyond: int = 0
    first_beyond: Beyond | None = None


def find_errors(sum_S: Tensor, reference: Reference, *, precision: Precision) -> Errors:
    """Compare fp32 sums with the reference of the same elements."""
    return merge_errors(
        _find_errors(sum_S[part.start - reference.start :][: len(part.exact_S)], part, precision=precision)
        for part in reference.portions()
    )


def _find_errors(sum_S: Tensor, reference: Reference, *, precision: Precision) -> Errors:
    exact_S, bound_S = reference.exact_S, bound(reference, precision)
    error_S = (sum_S.double() - exact_S).abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    in_ulps_S = error_S / ulps(exact_S)
    beyond_S = different_bits(sum_S, reference.on_grid_S) if precision.on_grid else ~(error_S <= bound_S)
    first = None
    if num_beyond := int(beyond_S.sum()):
        at = first_of(beyond_S)
        first = Beyond(reference.start + at, *(float(each[at]) for each in (sum_S, exact_S, bound_S)))
    return Errors(
        num_elements=len(exact_S),
        largest_ulp=float(in_ulps_S.max()),
        total_ulp=float(in_ulps_S.sum()),
        num_off=int(different_bits(sum_S, exact_S.float()).sum()),
        bound_share=float((error_S / bound_S).max()),
        num_beyond=num_beyond,
        first_beyond=first,
    )


def merge_errors(parts: Iterable[Errors]) -> Errors:
    """Merge the errors of several parts, in the order of their elements."""
    each = [Errors(), *parts]
    return Errors(
        num_elements=sum(part.num_elements for part in each),
        largest_ulp=max(part.largest_ulp for part in each),
        total_ulp=sum(part.total_ulp for part in each),
        num_off=sum(part.num_off for part in each),
        bound_share=max(part.bound_share for part in each),
        num_beyond=sum(part.num_beyond for part in each),
        first_beyond=next((part.first_beyond for part in each if part.first_beyond), None),
    )


def different_bits(a_N: Tensor, b_N: Tensor) -> Tensor:
    """Tell which elements of two fp32 tensors differ in a bit, including -0 from 0 and one NaN from another."""
    return a_N.view(torch.int32) != b_N.view(torch.int32)


def first_of(is_so_N: Tensor) -> int:
    """Return the index of the first True element."""
    return int(is_so_N.to(torch.uint8).argmax())


def classes_of(digests: Sequence[str]) -> list[int]:
    """Number digests from 1 on, with equal numbers for equal digests."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(digest, len(numbers) + 1) for digest in digests]
