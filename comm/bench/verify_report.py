"""What `bigbatch comm verify` leaves behind: a table with its verdict, and a JSONL file."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from bigbatch.comm.bench.exactness import PRECISIONS, classes_of
from bigbatch.comm.bench.figures import show_bytes
from bigbatch.comm.bench.repeated_sums import Outcome
from bigbatch.comm.bench.transcript import Transcript
from bigbatch.comm.tuning.conditions import Conditions


@dataclass(frozen=True)
class VerifyRow:
    """Holds the figures of one algorithm and cut, at one size and precision."""

    size: int
    """Bytes of the numbers on each rank, in fp32."""
    count: int
    """Elements."""
    precision: str
    algorithm: str
    pieces: int
    """In so many parts the tensor was summed."""
    largest_ulp: float | None
    """Of an element's error, in units in the last place of fp32 at the exact sum; None if not finite."""
    mean_ulp: float | None
    bound_share: float | None
    """Largest of error / bound."""
    num_off: int
    """Elements whose bits are not those of the exact sum, rounded once."""
    bits: int
    """Equal numbers, within a size and precision, for equal bits."""
    repetitions: int
    num_repeated: int
    """Repetitions in which every rank held the bits of its first."""
    ranks_agree: bool
    sha256: str
    findings: tuple[str, ...]

    @property
    def sum(self) -> str:
        """Name the algorithm and its cut."""
        return self.algorithm if self.pieces == 1 else f"{self.algorithm} in {self.pieces} pieces"


def make_rows(
    outcomes: Mapping[tuple[str, int], Outcome], *, count: int, precision: str, repetitions: int
) -> list[VerifyRow]:
    """Make the rows of one size and precision, whose sums are by (algorithm, pieces)."""
    classes = classes_of([outcome.digest for outcome in outcomes.values()])
    rows = []
    for ((algorithm, pieces), outcome), bits in zip(outcomes.items(), classes, strict=True):
        errors = outcome.errors
        row = VerifyRow(
            size=4 * count,
            count=count,
            precision=precision,
            algorithm=algorithm,
            pieces=pieces,
            largest_ulp=_finite(errors.largest_ulp),
            mean_ulp=_finite(errors.total_ulp / count),
            bound_share=_finite(errors.bound_share),
            num_off=errors.num_off,
            bits=bits,
            repetitions=repetitions,
            num_repeated=outcome.num_repeated,
            ranks_agree=outcome.ranks_agree,
            sha256=outcome.digest,
            findings=(),
        )
        what = f"{row.sum}, {precision}, {show_bytes(row.size)}"
        rows.append(dataclasses.replace(row, findings=tuple(f"{what}: {each}" for each in outcome.findings)))
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_COLUMNS = (
    # (title, unit, width)
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("precision", "", 11),
    ("algorithm", "", 14),
    ("pieces", "", 8),
    ("largest", "(ulp)", 10),
    ("mean", "(ulp)", 10),
    ("of bound", "(%)", 10),
    ("#off", "(elements)", 12),
    ("bits", "(class)", 9),
    ("repeated", "", 10),
    ("ranks", "", 8),
)


def table_head() -> str:
    """Write names and units of the columns."""
    lines = ("".join(f"{column[i]:>{column[2]}}" for column in _COLUMNS) for i in (0, 1))
    return "\n".join(f"#{line[1:]}".rstrip() for line in lines)


def table_line(row: VerifyRow) -> str:
    """Write a row under table_head."""
    texts = (
        *(str(row.size), str(row.count), row.precision, row.algorithm, str(row.pieces)),
        *(_show(row.largest_ulp), _show(row.mean_ulp)),
        _show(None if row.bound_share is None else 100 * row.bound_share),
        *(str(row.num_off), str(row.bits), f"{row.num_repeated}/{row.repetitions}"),
        "same" if row.ranks_agree else "DIFFER",
    )
    return "".join(f"{text:>{column[2]}}" for text, column in zip(texts, _COLUMNS, strict=True))


def _show(value: float | None) -> str:
    return "inf" if value is None else f"{value:.3g}"


def verdict(rows: Sequence[VerifyRow]) -> str:
    """Say in a line what all rows come to."""
    if num_findings := sum(len(row.findings) for row in rows):
        return f"FAILED: {num_findings} finding(s), above; do not train with these sums before the cause is known"
    pairs = {name: count_pairs([row for row in rows if row.precision == name]) for name in PRECISIONS}
    pairs = {name: each for name, each in pairs.items() if each[1]}
    differ = ", ".join(f"{different} of {total} in {name}" for name, (different, total) in pairs.items())
    texts = ["every sum repeats its own bits, on all ranks alike, within its bound"]
    if differ:
        texts.append(f"pairs of sums that differ from each other: {differ}")
    if any(different for different, _ in pairs.values()):
        texts.append("set run.reproducible for sums that do not")
    return "; ".join(texts)


def count_pairs(rows: Sequence[VerifyRow]) -> tuple[int, int]:
    """Count the pairs of sums of one precision that differ at any size, and all pairs."""
    by_sum: dict[str, list[str]] = {}
    for row in rows:
        by_sum.setdefault(row.sum, []).append(row.sha256)
    pairs = list(combinations(by_sum.values(), 2))
    return sum(a != b for a, b in pairs), len(pairs)


class VerifyReport:
    """Writes the first rank's table and JSONL file; on the other ranks it only keeps the rows."""

    def __init__(
        self, conditions: Conditions, *, output: Path | None, seed: int, is_first: bool, on_terminal: bool
    ) -> None:
        self._conditions, self._seed = conditions, seed
        self._transcript = Transcript(output, is_first=is_first, on_terminal=on_terminal)
        self._rows: list[VerifyRow] = []

    @property
    def has_failed(self) -> bool:
        """Tell whether anything was found wrong so far."""
        return any(row.findings for row in self._rows)

    def open(self, command: str) -> str:
        """Open the file, before anything takes long; return what stands in the way, or nothing."""
        try:
            self._transcript.open()
        except OSError as error:
            return f"cannot write {error.filename}: {error.strerror}; choose another --output"
        self._transcript.write({"kind": "conditions", "command": command, **dataclasses.asdict(self._conditions)})
        return ""

    def head(self) -> None:
        """Write the lines above the table."""
        conditions = self._conditions
        groups = "+".join(str(len(group)) for group in conditions.groups)
        hosts = ", ".join(dict.fromkeys(conditions.hosts))
        for line in (
            f"bigbatch comm verify: {len(conditions.hosts)} ranks, {groups} per node; backend {conditions.backend}; "
            f"half precision summed in {conditions.reduce_dtype}; seed {self._seed}; started by {conditions.launcher}",
            f"hosts {hosts}; {conditions.device}; torch {conditions.torch}; {conditions.date}",
            "ulp: unit in the last place of fp32 at the exact sum; a correctly rounded sum is at most half a one away",
            "of bound: largest error / what one rounding per rank of the sum of magnitudes may come to",
            "#off: elements whose bits are not those of the exact sum, rounded once",
            "bits: sums of the same class, within a size and precision, have the same bits",
        ):
            self._transcript.print(f"# {line}")
        self._transcript.print(table_head())

    def working_on(self, text: str) -> None:
        """Show what is under way, as Transcript.working_on does."""
        self._transcript.working_on(text)

    def add(self, rows: Sequence[VerifyRow]) -> None:
        """Show and keep one size and precision."""
        self._rows += rows
        self.working_on("")
        for row in rows:
            self._transcript.print(table_line(row))
            self._transcript.write({"kind": "row", **dataclasses.asdict(row)})
        for finding in (finding for row in rows for finding in row.findings):
            self._transcript.print(f"# FAILED: {finding}")

    def close(self) -> None:
        """Write what it comes to."""
        text = verdict(self._rows)
        self._transcript.print(f"# {text}")
        self._transcript.write({"kind": "verdict", "failed": self.has_failed, "text": text})
        self._transcript.close()
