"""Find errors of sums over ranks: draw numbers with a known exact sum, sum them repeatedly, and compare the results."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.grid import FRACTION_BITS, SUM_BITS, Grid
from bigbatch.comm.measure.figures import show_bytes
from bigbatch.comm.measure.hangs import exchange, sum_label
from bigbatch.comm.rendezvous.late_ranks import name_ranks

SCALES, SPREAD = 24, 8
"""An element's magnitude is one of SCALES powers of two; each rank divides it by one of SPREAD powers of two."""
PORTION = 1 << 20
"""Elements that are drawn or compared at a time."""
WORD = (1 << 32) - 1
SCALE_KEY, RANK_KEY = 0x5EED, 0x9E3779B1
PARTS = 64
"""Number of parts of each cut in the search for the first element in which two ranks differ."""
SHOWN_RANKS = 4


@dataclass(frozen=True)
class SumPrecision:
    """How fp32 numbers are summed: in fp32, over a narrower wire, or as integers on a fixed-point grid (Grid)."""

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
        SumPrecision("fp32"),
        SumPrecision("bf16-wire", "bfloat16"),
        SumPrecision("fp16-wire", "float16"),
        SumPrecision("grid", on_grid=True),
    )
}


def random_terms(start: int, stop: int, *, rank: int, seed: int, device: torch.device) -> Tensor:
    """Return a rank's random numbers for elements start to stop: fp32 of either sign, from 2**-31 to 1 in size.

    They depend only on seed, rank and element. An element has one magnitude on all ranks, from 2**-23 to 1, as a
    weight's gradients do; each rank's number is smaller by a factor down to 2**-8. So float64 adds the numbers of
    4,000,000 ranks without rounding.
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
    """Return the grid that gradients use, with fewer fraction bits only if thousands of ranks leave no room."""
    return Grid(num_ranks, fraction_bits=min(FRACTION_BITS, SUM_BITS - (num_ranks - 1).bit_length()))


@dataclass(frozen=True)
class ExactSums:
    """The exact sums of elements from start on."""

    start: int
    num_ranks: int
    exact_S: Tensor
    """float64, without rounding."""
    magnitude_S: Tensor
    """Sum of magnitudes, float64."""
    on_grid_S: Tensor
    """The fp32 sums that Grid.read_() must write, bit for bit."""


def make_reference(start: int, stop: int, *, num_ranks: int, seed: int, device: torch.device) -> ExactSums:
    """Return the exact sums of all ranks' numbers for elements start to stop."""
    exact_S, magnitude_S = torch.zeros(2, stop - start, dtype=torch.float64, device=device)
    integers_S = torch.zeros(stop - start, dtype=torch.int64, device=device)
    scale = 2.0 ** grid_for(num_ranks).fraction_bits
    for rank in range(num_ranks):
        numbers_S = random_terms(start, stop, rank=rank, seed=seed, device=device).double()
        exact_S += numbers_S
        magnitude_S += numbers_S.abs()
        integers_S += (numbers_S * scale).round().to(torch.int64)
    return ExactSums(start, num_ranks, exact_S, magnitude_S, integers_S.float() / scale)


def bound(reference: ExactSums, precision: SumPrecision) -> Tensor:
    """Return the largest error that each sum may have, as float64.

    fp32: one rounding per rank, each at most 2**-24 of the rounded value, which is at most the sum of magnitudes plus
    earlier roundings. A narrower wire rounds once more per rank, by half its eps, or half its smallest number, and its
    packing takes three roundings in fp32. On the grid: half the grid spacing per rank, and one rounding of the sum.
    """
    num_ranks = reference.num_ranks
    own = torch.finfo(torch.float32).eps / 2
    if precision.on_grid:
        spacings = num_ranks / 2 * 2.0 ** -grid_for(num_ranks).fraction_bits
        return spacings + (reference.exact_S.abs() + spacings) * own
    roundings, least = num_ranks * math.log1p(own), 0.0
    if precision.wire_dtype:
        wire = torch.finfo(precision.travels_as)
        roundings += num_ranks * math.log1p(wire.eps / 2) + 3 * math.log1p(own)
        least = num_ranks * wire.smallest_normal * wire.eps / 2
    factor = math.expm1(roundings)
    return factor * reference.magnitude_S + least * (1 + factor)


def ulps(exact_S: Tensor) -> Tensor:
    """Return fp32's unit in the last place at each exact sum: from the nearest fp32 number to the next one outward."""
    nearest_S = exact_S.float().abs()
    return torch.nextafter(nearest_S, torch.full_like(nearest_S, torch.inf)).double() - nearest_S.double()


@dataclass(frozen=True)
class Errors:
    """The errors of some elements of a sum."""

    num_elements: int
    largest_ulp: float
    total_ulp: float
    num_off: int
    """Number of elements whose bits differ from the exact sum's, rounded once to fp32."""
    bound_share: float
    """Largest of error / bound."""
    num_beyond: int
    first_beyond: Sequence[float] | None
    """The first element beyond its bound: its index, its value, the exact sum and the bound of its error."""


def find_errors(sum_S: Tensor, reference: ExactSums, *, precision: SumPrecision) -> Errors:
    """Compare fp32 sums with the reference of the same elements."""
    exact_S, bound_S = reference.exact_S, bound(reference, precision)
    error_S = (sum_S.double() - exact_S).abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    in_ulps_S = error_S / ulps(exact_S)
    beyond_S = different_bits(sum_S, reference.on_grid_S) if precision.on_grid else ~(error_S <= bound_S)
    first = None
    if num_beyond := int(beyond_S.sum()):
        at = first_of(beyond_S)
        first = (reference.start + at, *(float(each[at]) for each in (sum_S, exact_S, bound_S)))
    return Errors(
        num_elements=len(exact_S),
        largest_ulp=float(in_ulps_S.max()),
        total_ulp=float(in_ulps_S.sum()),
        num_off=int(different_bits(sum_S, exact_S.float()).sum()),
        bound_share=float((error_S / bound_S).max()),
        num_beyond=num_beyond,
        first_beyond=first,
    )


def different_bits(a_N: Tensor, b_N: Tensor) -> Tensor:
    """Return which elements of two fp32 tensors differ in a bit, including -0 from 0 and one NaN from another."""
    return a_N.view(torch.int32) != b_N.view(torch.int32)


def first_of(is_so_N: Tensor) -> int:
    return int(is_so_N.to(torch.uint8).argmax())


@dataclass(frozen=True)
class VerifyRow:
    """Figures of one algorithm and cut, at one size and precision, over all ranks and repetitions."""

    size: int
    """Bytes of the numbers on each rank, in fp32."""
    count: int
    """Elements."""
    precision: str
    algorithm: str
    pieces: int
    """Number of parts in which the tensor was summed."""
    largest_ulp: float | None
    """Largest error of an element of the first repetition, in units in the last place of fp32 at the exact sum; None
    if not finite."""
    mean_ulp: float | None
    bound_share: float | None
    """Largest of error / bound."""
    num_off: int
    """Number of elements whose bits differ from the exact sum's, rounded once."""
    bits: int
    """Class of sums with the same bits, within a size and precision, from 1 on; 0 until number_classes() sets it."""
    repetitions: int
    num_repeated: int
    """Number of repetitions, the first included, in which every rank got the bits of its first sum."""
    ranks_agree: bool
    sha256: str
    """Digest of the first repetition's sums, as most ranks hold them."""
    findings: tuple[str, ...]
    """Descriptions of errors, a sentence each; empty for a good sum."""


class DrawnSums:
    """Sums drawn numbers of one size repeatedly, and compares the sums. Each rank checks its part of the elements."""

    def __init__(self, communicator: Communicator, *, count: int, seed: int) -> None:
        device, num_ranks, rank = communicator.device, communicator.world_size, communicator.rank
        self._grid = grid_for(num_ranks)
        spans = [(at, min(at + PORTION, count)) for at in range(0, count, PORTION)]
        self._own_N = torch.cat([random_terms(*span, rank=rank, seed=seed, device=device) for span in spans])
        start, stop = rank * count // num_ranks, (rank + 1) * count // num_ranks
        self._references = [
            make_reference(at, min(at + PORTION, stop), num_ranks=num_ranks, seed=seed, device=device)
            for at in range(start, stop, PORTION)
        ]
        self._first_N, self._result_N = torch.empty_like(self._own_N), torch.empty_like(self._own_N)

    def repeat(
        self, communicator: Communicator, memory_N: Tensor, *, precision: SumPrecision, pieces: int, repetitions: int
    ) -> VerifyRow:
        """Sum the numbers repeatedly, each time in pieces; return the figures over all ranks. Collective.

        memory_N: scratch of precision.dtype, with one element more than the numbers. Call it inside limited().
        Raises: HungError; PeerLostError.
        """
        changes: list[tuple[int, int, int]] = []
        for repetition in range(repetitions):
            self._sum(communicator, memory_N, precision=precision, pieces=pieces)
            if not repetition:
                self._first_N.copy_(self._result_N)
                continue
            changed_N = different_bits(self._result_N, self._first_N)
            if num_changed := int(changed_N.sum()):
                changes.append((repetition, first_of(changed_N), num_changed))
        own = [
            astuple(find_errors(self._first_N[each.start :][: len(each.exact_S)], each, precision=precision))
            for each in self._references
        ]
        mine = [_digest(self._first_N), changes, own]
        # together, as gathering over thousands of ranks takes longer than a sum
        everyone = exchange(mine, communicator)
        digests, all_changes, all_errors = zip(*everyone, strict=True)
        parts = [[Errors(*errors) for errors in of_rank] for of_rank in all_errors]
        errors = [each for of_rank in parts for each in of_rank]
        found = (
            *_find_odd_ranks(self._first_N, digests, communicator),
            *_find_changes(all_changes),
            *_find_beyond_bound(parts, precision=precision),
        )
        count, algorithm, cut = len(self._own_N), communicator.algorithm, "" if pieces == 1 else f" in {pieces} pieces"
        return VerifyRow(
            size=4 * count,
            count=count,
            precision=precision.name,
            algorithm=algorithm,
            pieces=pieces,
            largest_ulp=_finite(max(each.largest_ulp for each in errors)),
            mean_ulp=_finite(sum(each.total_ulp for each in errors) / count),
            bound_share=_finite(max(each.bound_share for each in errors)),
            num_off=sum(each.num_off for each in errors),
            bits=0,
            repetitions=repetitions,
            num_repeated=repetitions - len({repetition for each in all_changes for repetition, _, _ in each}),
            ranks_agree=len({*digests}) == 1,
            sha256=_usual(digests),
            findings=tuple(f"{algorithm}{cut}, {precision.name}, {show_bytes(4 * count)}: {each}" for each in found),
        )

    def _sum(self, communicator: Communicator, memory_N: Tensor, *, precision: SumPrecision, pieces: int) -> None:
        """Sum into the result, as gradients are summed; with a grid one more element counts numbers out of range."""
        sums_N = memory_N if precision.on_grid else memory_N[:-1]
        if precision.on_grid:
            self._grid.add_(sums_N.zero_(), self._own_N)
        else:
            sums_N.copy_(self._own_N)
        for index, piece_M in enumerate(sums_N.tensor_split(pieces)):
            what = f"piece {index} of {pieces} in {precision.name}"
            communicator.sum_(piece_M, label=sum_label(what, communicator.algorithm))
        if precision.on_grid:
            self._grid.read_(self._result_N, sums_N)
        else:
            self._result_N.copy_(sums_N)


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def _digest(tensor_N: Tensor) -> str:
    return hashlib.sha256(tensor_N.cpu().numpy().data).hexdigest()


def _usual(digests: Sequence[str]) -> str:
    """Return the most frequent digest; among equally frequent ones, that of the lowest rank."""
    return Counter(digests).most_common(1)[0][0]


def _find_odd_ranks(sum_N: Tensor, digests: Sequence[str], communicator: Communicator) -> list[str]:
    usual = _usual(digests)
    odd = [rank for rank, digest in enumerate(digests) if digest != usual]
    if not odd:
        return []
    like = digests.index(usual)
    element = _find_difference(sum_N, communicator, odd=odd[0], like=like)
    value = communicator.gather_text(f"{sum_N[element].item():.9g}")
    return [
        f"{name_ranks(odd)} held other bits than rank {like} after the first sum; in element {element} rank {odd[0]} "
        f"held {value[odd[0]]}, and rank {like} {value[like]}"
    ]


def _find_difference(sum_N: Tensor, communicator: Communicator, *, odd: int, like: int) -> int:
    """Return the first element in which two ranks' sums differ, by digests of ever smaller parts. Collective."""
    start, stop = 0, len(sum_N)
    while stop - start > 1:
        size = -(-(stop - start) // PARTS)
        starts = range(start, stop, size)
        digests = communicator.gather([_digest(sum_N[at : min(at + size, stop)])[:32] for at in starts])
        pairs = zip(digests[odd], digests[like], strict=True)
        start = starts[next(index for index, (a, b) in enumerate(pairs) if a != b)]
        stop = min(start + size, stop)
    return start


def _find_changes(all_changes: Sequence[Sequence[tuple[int, int, int]]]) -> list[str]:
    """Return a sentence for each repetition whose bits differ from those of the first. all_changes: by rank."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for rank, changes in enumerate(all_changes):
        for repetition, element, num_changed in changes:
            found.setdefault(repetition, []).append((rank, element, num_changed))
    lines = []
    for repetition, changed in sorted(found.items()):
        ranks, (rank, element, num_changed) = [each[0] for each in changed], changed[0]
        where = "every rank" if len(ranks) == len(all_changes) else name_ranks(ranks)
        lines.append(
            f"repetition {repetition + 1} gave other bits than the first on {where}, in {num_changed} elements of rank "
            f"{rank}, the first of them element {element}"
        )
    return lines


def _find_beyond_bound(parts: Sequence[Sequence[Errors]], *, precision: SumPrecision) -> list[str]:
    """Return a sentence for each rank with errors beyond the bound, or on the grid with wrong bits. parts: by rank."""
    found = []
    for rank, of_rank in enumerate(parts):
        if first := next((part.first_beyond for part in of_rank if part.first_beyond), None):
            element, got, exact, limit = first
            ulp = float(ulps(torch.tensor([exact], dtype=torch.float64)))
            allowed = "the grid has one sum only" if precision.on_grid else f"the bound is {limit / ulp:.3g} ulp"
            num_beyond = sum(part.num_beyond for part in of_rank)
            num_elements = sum(part.num_elements for part in of_rank)
            found.append(
                f"rank {rank} found {num_beyond} of {num_elements} elements wrong; element {element} is {got:.9g}, "
                f"the exact sum {exact:.9g}, {abs(got - exact) / ulp:.3g} ulp away, and {allowed}"
            )
    return found if len(found) <= SHOWN_RANKS else [*found[:SHOWN_RANKS], f"and {len(found) - SHOWN_RANKS} ranks more"]
