"""Repeat sums of drawn numbers, and report errors in them. All functions here are collective."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.measure.exactness import (
    Beyond,
    Errors,
    Precision,
    different_bits,
    draw,
    find_errors,
    first_of,
    grid_for,
    make_reference,
    merge_errors,
    part_of,
    ulps,
)

PARTS = 64
"""Number of parts of each cut in the search for the first element in which two ranks differ."""
SHOWN_RANKS = 4


@dataclass(frozen=True)
class Outcome:
    """Results of one way to sum, over all ranks and repetitions."""

    errors: Errors
    """Errors of the first repetition."""
    digest: str
    """SHA-256 of the first repetition's sums, as most ranks hold them."""
    ranks_agree: bool
    num_repeated: int
    """Repetitions, the first included, in which every rank held the bits of its first."""
    findings: tuple[str, ...]
    """Descriptions of errors, a sentence each; empty for a good sum."""


class DrawnSums:
    """Sums drawn numbers of one size repeatedly, and compares. Each rank checks its part of the elements."""

    def __init__(self, communicator: Communicator, *, count: int, seed: int) -> None:
        device, num_ranks, rank = communicator.device, communicator.world_size, communicator.rank
        self._grid = grid_for(num_ranks)
        self._own_N = torch.cat(
            [
                draw(at, min(at + (1 << 20), count), rank=rank, seed=seed, device=device)
                for at in range(0, count, 1 << 20)
            ]
        )
        start, stop = part_of(count, rank=rank, num_ranks=num_ranks)
        self._reference = make_reference(start, stop, num_ranks=num_ranks, seed=seed, device=device)
        self._part = slice(start, stop)
        self._first_N, self._result_N = torch.empty_like(self._own_N), torch.empty_like(self._own_N)

    def repeat(
        self, communicator: Communicator, memory_N: Tensor, *, precision: Precision, pieces: int, repetitions: int
    ) -> Outcome:
        """Sum `times` times in pieces, in memory_N, of precision.dtype and one element more than the numbers.

        Raises: PeerLostError.
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
        errors = find_errors(self._first_N[self._part], self._reference, precision=precision)
        mine = {"digest": _digest(self._first_N), "changes": changes, "errors": asdict(errors)}
        # together, as gathering over thousands of ranks takes longer than a sum
        everyone = [json.loads(text) for text in communicator.gather_text(json.dumps(mine))]
        digests = [each["digest"] for each in everyone]
        parts = [_read_errors(each["errors"]) for each in everyone]
        changed = {rank: each["changes"] for rank, each in enumerate(everyone) if each["changes"]}
        return Outcome(
            merge_errors(parts),
            _usual(digests),
            ranks_agree=len({*digests}) == 1,
            num_repeated=repetitions - len({change[0] for each in changed.values() for change in each}),
            findings=(
                *_find_odd_rank(self._first_N, digests, communicator),
                *_find_changes(changed, num_ranks=len(everyone)),
                *_find_beyond(parts, precision=precision),
            ),
        )

    def _sum(self, communicator: Communicator, memory_N: Tensor, *, precision: Precision, pieces: int) -> None:
        """Sum into the result, like gradients: on the grid with one element more, which counts numbers beyond it."""
        sums_N = memory_N if precision.on_grid else memory_N[:-1]
        if precision.on_grid:
            self._grid.add_(sums_N.zero_(), self._own_N)
        else:
            sums_N.copy_(self._own_N)
        for index, piece_M in enumerate(sums_N.tensor_split(pieces)):
            communicator.sum_(piece_M, label=f"piece {index} of {pieces} by {communicator.algorithm}, {precision.name}")
        if precision.on_grid:
            self._grid.read_(self._result_N, sums_N)
        else:
            self._result_N.copy_(sums_N)


def _digest(tensor_N: Tensor) -> str:
    return hashlib.sha256(tensor_N.cpu().numpy().data).hexdigest()


def _read_errors(record: Mapping[str, object]) -> Errors:
    beyond = record["first_beyond"]
    return Errors(**{**record, "first_beyond": Beyond(**beyond) if isinstance(beyond, dict) else None})  # type: ignore[arg-type]


def _usual(digests: Sequence[str]) -> str:
    """Return the digest of most ranks; among equals the first one."""
    return Counter(digests).most_common(1)[0][0]


def _find_odd_rank(sum_N: Tensor, digests: Sequence[str], communicator: Communicator) -> list[str]:
    usual = _usual(digests)
    odd = [rank for rank, digest in enumerate(digests) if digest != usual]
    if not odd:
        return []
    like = digests.index(usual)
    element = _find_difference(sum_N, communicator, odd=odd[0], like=like)
    value = communicator.gather_text(f"{sum_N[element].item():.9g}")
    return [
        f"{_ranks(odd)} held other bits than rank {like} after the first sum; in element {element} rank {odd[0]} "
        f"held {value[odd[0]]}, and rank {like} {value[like]}"
    ]


def _find_difference(sum_N: Tensor, communicator: Communicator, *, odd: int, like: int) -> int:
    """Find the first element in which two ranks that hold different bits differ, by digests of ever smaller parts."""
    start, stop = 0, len(sum_N)
    while stop - start > 1:
        size = -(-(stop - start) // PARTS)
        starts = range(start, stop, size)
        mine = " ".join(_digest(sum_N[at : min(at + size, stop)])[:32] for at in starts)
        texts = communicator.gather_text(mine)
        pairs = zip(texts[odd].split(), texts[like].split(), strict=True)
        start = starts[next(index for index, (a, b) in enumerate(pairs) if a != b)]
        stop = min(start + size, stop)
    return start


def _find_changes(changed: Mapping[int, Sequence[Sequence[int]]], *, num_ranks: int) -> list[str]:
    """Return a sentence for each repetition with other bits than the first one."""
    found: dict[int, dict[int, Sequence[int]]] = {}
    for rank, changes in changed.items():
        for repetition, *where in changes:
            found.setdefault(repetition, {})[rank] = where
    return [
        f"repetition {repetition + 1} gave other bits than the first on {_ranks(list(ranks), of=num_ranks)}, in "
        f"{next(iter(ranks.values()))[1]} elements of rank {next(iter(ranks))}, the first of them element "
        f"{next(iter(ranks.values()))[0]}"
        for repetition, ranks in sorted(found.items())
    ]


def _find_beyond(parts: Sequence[Errors], *, precision: Precision) -> list[str]:
    """Return where an error exceeds its bound; on the grid, where a sum is not the only exact one."""
    found = []
    for rank, part in enumerate(parts):
        if beyond := part.first_beyond:
            ulp = float(ulps(torch.tensor([beyond.exact], dtype=torch.float64)))
            limit = "the grid has one sum only" if precision.on_grid else f"the bound is {beyond.bound / ulp:.3g} ulp"
            found.append(
                f"rank {rank} found {part.num_beyond} of {part.num_elements} elements wrong; element {beyond.element} "
                f"is {beyond.got:.9g}, the exact sum {beyond.exact:.9g}, {abs(beyond.got - beyond.exact) / ulp:.3g} "
                f"ulp away, and {limit}"
            )
    return found if len(found) <= SHOWN_RANKS else [*found[:SHOWN_RANKS], f"and {len(found) - SHOWN_RANKS} ranks more"]


def _ranks(ranks: Sequence[int], *, of: int | None = None) -> str:
    if len(ranks) == of:
        return "every rank"
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS])) + (
        f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
