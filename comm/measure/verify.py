"""`bigbatch comm bench --verify`: sums compared with exact ones, repeated, and compared with each other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import make_wire
from bigbatch.comm.measure.exactness import PRECISIONS, DrawnSums, SumPrecision, VerifyRow
from bigbatch.comm.measure.figures import show_bytes
from bigbatch.comm.measure.hangs import HungError, limited
from bigbatch.comm.measure.report import BenchReport, Columns
from bigbatch.errors import CommError

WORKING_COPIES = 17
"""Memory as a multiple of the fp32 numbers: for them and their sums, int64 of twice the bytes, as much again for
algorithms, float64 references, and the numbers on their way to the grid."""


def _short(figure: float | None) -> str:
    return "inf" if figure is None else f"{figure:.3g}"


COLUMNS: Columns = (
    ("size", "(B)", 12, lambda row: row.size),
    ("count", "(elements)", 12, lambda row: row.count),
    ("precision", "", 11, lambda row: row.precision),
    ("algorithm", "", 14, lambda row: row.algorithm),
    ("pieces", "", 8, lambda row: row.pieces),
    ("largest", "(ulp)", 10, lambda row: _short(row.largest_ulp)),
    ("mean", "(ulp)", 10, lambda row: _short(row.mean_ulp)),
    ("of bound", "(%)", 10, lambda row: _short(row.bound_share and 100 * row.bound_share)),
    ("#off", "(elements)", 12, lambda row: row.num_off),
    ("bits", "(class)", 9, lambda row: row.bits),
    ("repeated", "", 10, lambda row: f"{row.num_repeated}/{row.repetitions}"),
    ("ranks", "", 8, lambda row: "same" if row.ranks_agree else "DIFFER"),
)
LEGEND = (
    "ulp: unit in the last place of fp32 at the exact sum; a correctly rounded sum is at most half a one away",
    "of bound: largest error / what one rounding per rank of the sum of magnitudes may come to",
    "#off: elements whose bits are not those of the exact sum, rounded once",
    "bits: sums of the same class, within a size and precision, have the same bits",
)


def verify_sizes(
    counts: Sequence[int],
    sums: Sequence[tuple[SumPrecision, Mapping[str, Communicator]]],
    report: BenchReport,
    *,
    pieces: Sequence[int],
    repetitions: int,
    seed: int,
) -> bool:
    """Verify each number of elements with each precision, algorithm and number of pieces. Collective.

    Return whether all is right. An algorithm that hangs is a fault, and is left out from then on.
    Raises: PeerLostError.
    """
    communicator, half = report.communicator, report.conditions.reduce_dtype
    report.open({}, (f"half precision summed in {half}; seed {seed}", *LEGEND), columns=COLUMNS)
    dtypes = sorted({precision.dtype for precision, _ in sums}, key=str)  # all ranks allocate in the same order

    def allocate() -> dict[torch.dtype, Tensor]:
        return dict(zip(dtypes, communicator.allocate_all([(max(counts) + 1, each) for each in dtypes]), strict=True))

    contestants, memory = dict(sums), allocate()
    rows, num_hung = list[VerifyRow](), 0
    for count in counts:
        size = show_bytes(4 * count)
        report.working_on(f"{size}: drawing numbers")
        drawn = DrawnSums(communicator, count=count, seed=seed)
        for precision in contestants:
            found = []
            for name in list(contestants[precision]):
                report.working_on(f"{size} in {precision.name} by {name}")
                each, memory_N = contestants[precision][name], memory[precision.dtype][: count + 1]
                try:
                    with limited(communicator):
                        found += [
                            drawn.repeat(each, memory_N, precision=precision, pieces=cut, repetitions=repetitions)
                            for cut in pieces
                        ]
                except HungError as hung:
                    num_hung += 1
                    report.print(f"# FAILED: {hung}")
                    contestants = {every: hung.reconnect(others) for every, others in contestants.items()}
                    memory = allocate()  # the hung sum may use the old one
            new = number_classes(found)
            rows += new
            report.rows(new)
            for finding in (finding for row in new for finding in row.findings):
                report.print(f"# FAILED: {finding}")
    text = verdict(rows, num_hung=num_hung)
    has_failed = num_hung > 0 or any(row.findings for row in rows)
    report.print(f"# {text}")
    report.write({"kind": "verdict", "failed": has_failed, "text": text})
    return not has_failed


def make_sums(
    communicator: Communicator,
    algorithms: Sequence[str],
    precisions: Sequence[SumPrecision] | None,
    *,
    reduce_dtype: str,
) -> list[tuple[SumPrecision, dict[str, Communicator]]]:
    """Return a communicator of each algorithm for each precision; None: all that the backend can sum. Collective.

    Raises: CommError for a precision that the backend cannot sum.
    """
    summable = communicator.backend.capabilities.dtypes
    chosen = precisions or [each for each in PRECISIONS.values() if each.travels_as in summable]
    for precision in chosen:
        if precision.travels_as not in summable:
            raise CommError(
                f"--precisions: {communicator.backend.name} cannot sum {precision.name}; leave it out, or take "
                "another --backend"
            )
    wires = [make_wire(each.wire_dtype, reduce_dtype=reduce_dtype) for each in chosen]
    return [
        (precision, {name: communicator.with_algorithm(name, wire=wire) for name in algorithms})
        for precision, wire in zip(chosen, wires, strict=True)
    ]


def number_classes(rows: Sequence[VerifyRow]) -> list[VerifyRow]:
    """Return the rows with their field bits set: the same number, from 1 on, for rows with the same bits."""
    digests = list(dict.fromkeys(row.sha256 for row in rows))
    return [replace(row, bits=digests.index(row.sha256) + 1) for row in rows]


def verdict(rows: Sequence[VerifyRow], *, num_hung: int = 0) -> str:
    """Return a line on the result of all rows. num_hung: number of algorithms that hang."""
    if num_findings := num_hung + sum(len(row.findings) for row in rows):
        return f"FAILED: {num_findings} finding(s), above; do not train with these sums before the cause is known"
    texts = ["every sum repeats its own bits, on all ranks alike, within its bound"]
    differ: dict[str, list[bool]] = {}
    for name in dict.fromkeys(row.precision for row in rows):
        # the bits of each sum at all sizes
        by_sum: dict[tuple[str, int], list[str]] = {}
        for row in rows:
            if row.precision == name:
                by_sum.setdefault((row.algorithm, row.pieces), []).append(row.sha256)
        if pairs := [a != b for a, b in combinations(by_sum.values(), 2)]:
            differ[name] = pairs
    if differ:
        counts = ", ".join(f"{sum(pairs)} of {len(pairs)} in {name}" for name, pairs in differ.items())
        texts.append(f"pairs of sums that differ from each other: {counts}")
    if any(map(any, differ.values())):
        texts.append("set run.reproducible for sums that do not")
    return "; ".join(texts)
