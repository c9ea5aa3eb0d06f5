"""Check rows that others have measured, add them to a table, and state how committed predictions fared.

    python -m benchmarks.twin.add_rows NEW.csv --to ROWS.csv [--commitment PREDICTIONS.json] [--out OUTCOMES.json]

A row is refused if a required value is missing or impossible, its units contradict each other, its name is taken, or it
contradicts a row of the table.
"""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.twin.predict import contradictions, digest, table_text
from benchmarks.twin.rows import Row, read_given
from bigbatch.comm.tuning.commit import source_commit
from bigbatch.errors import SimulationError, first_line, print_line, tell
from bigbatch.files import write_named

ORIGIN = ("source", "round_or_year")
"""Columns that a new row must state, so that others can check it."""


def check_new(new: Sequence[Row], known: Sequence[Row]) -> None:
    """Raise SimulationError for a row that names no source, has a known name, or contradicts another."""
    names = {row.id for row in known}
    for row in new:
        if missing := [column for column in ORIGIN if not row[column]]:
            raise SimulationError(f"row {row.id} states no {missing[0]}: say where and when it was measured")
        if row.id in names:
            raise SimulationError(f"row {row.id} is in the table already: name it otherwise")
        names.add(row.id)
    if lines := [line for line in contradictions([*known, *new]) if any(row.id in line.split() for row in new)]:
        raise SimulationError(lines[0])


@dataclass(frozen=True)
class Promise:
    """Committed milliseconds of a row, and the measured row from which they were scaled."""

    predicted: float
    low: float
    high: float
    base: str


@dataclass(frozen=True)
class Outcome:
    """A measured row beside its promise; milliseconds."""

    row: Row
    promise: Promise
    measured: float
    linear: float | None
    """What the base's rate at the row's local batch would take; None if the base is not in the table."""

    @property
    def error(self) -> float:
        return self.promise.predicted / self.measured - 1

    @property
    def is_held(self) -> bool:
        return self.promise.low <= self.measured <= self.promise.high

    def line(self) -> str:
        return (
            f"{self.row.id}: {self.promise.predicted:.4g} ms predicted ({self.promise.low:.4g} to "
            f"{self.promise.high:.4g}), {self.measured:.4g} measured: {self.error:+.1%}, "
            f"{'inside' if self.is_held else 'outside'} the interval"
        )


def outcomes_of(added: Sequence[Row], promises: Mapping[str, Promise], table: Sequence[Row]) -> list[Outcome]:
    known = {row.id: row for row in table}
    found = []
    for row in added:
        if row.id in promises:
            base = known.get(promises[row.id].base)
            rate = base.local_batch / base.seconds if base and base.seconds else None
            assert row.seconds is not None
            linear = 1e3 * row.local_batch / rate if rate else None
            found.append(Outcome(row, promises[row.id], 1e3 * row.seconds, linear))
    return found


def summarise(found: Sequence[Outcome]) -> dict[str, Any]:
    """Return medians of the absolute errors, and the share of the rows inside their intervals."""
    linear = [abs(each.linear / each.measured - 1) for each in found if each.linear]
    return {
        "rows": len(found),
        "ours": round(median(abs(each.error) for each in found), 4),
        "linear": round(median(linear), 4) if linear else None,
        "held": round(sum(each.is_held for each in found) / len(found), 3),
    }


def record(found: Sequence[Outcome], promised: Mapping[str, str]) -> dict[str, Any]:
    """Return the outcomes of all rows, by system, and of each row, for a file of results."""
    names = dict.fromkeys(each.row["family"] or each.row["ladder"] for each in found)
    by = {name: [each for each in found if name == (each.row["family"] or each.row["ladder"])] for name in names}
    places = {
        "all": found,
        "across nodes": [each for each in found if each.row.num_nodes > 1],
        "inside one node": [each for each in found if each.row.num_nodes == 1],
    }
    return {
        "promised": promised,
        "commit": source_commit(),
        "summaries": {name: summarise(rows) for name, rows in places.items() if rows},
        "systems": {name: summarise(rows) | {"source": rows[0].row["source"]} for name, rows in by.items()},
        "rows": {
            each.row.id: {
                "measured": round(each.measured, 3),
                "predicted": each.promise.predicted,
                "low": each.promise.low,
                "high": each.promise.high,
                "linear": each.linear and round(each.linear, 3),
            }
            for each in found
        },
    }


def read_commitment(path: Path) -> tuple[dict[str, Promise], dict[str, str]]:
    """Return the promise of each row, and the commitment's digest and commit.

    Raises: SimulationError if the file cannot be read, or if its predictions are not those of its digest.
    """
    try:
        stored = json.loads(path.read_text())
        lines = [(name, *values) for name, values in stored["predictions"].items()]
        is_changed = digest(table_text(lines)) != stored["sha256"]
        promises = {}
        for name, predicted, low, high, _, base in lines:
            promises[name] = Promise(float(predicted), float(low), float(high), base)
        origin = {key: stored[key] for key in ("sha256", "commit")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise SimulationError(f"cannot read {path}: {first_line(error)}") from error
    if is_changed:
        raise SimulationError(f"the predictions in {path} are not those of its sha256: they were changed later")
    return promises, origin


def read_both(new: Path, table: Path) -> tuple[list[Row], list[Row]]:
    """Return the checked rows of a file and those of the table to which they go. Raises: SimulationError."""
    found, known = read_given(new), read_given(table)
    if found.unusable:
        raise SimulationError(found.unusable[0])
    check_new(found.rows, known.rows)
    columns = _columns(table.read_text(encoding="utf-8-sig"))
    if unknown := [name for name in found.rows[0].stated if name not in columns]:
        raise SimulationError(f"{new} has a column {unknown[0]} that {table} has not")
    return found.rows, known.rows


def append(rows: Sequence[Row], table: Path) -> None:
    """Append rows to a table, in its columns. Raises: OSError."""
    text = table.read_text(encoding="utf-8-sig")
    with table.open("a", newline="", encoding="utf-8") as file:
        file.write("" if text.endswith("\n") else "\n")
        csv.DictWriter(file, _columns(text), lineterminator="\n").writerows(dict(row.stated) for row in rows)


def _columns(text: str) -> list[str]:
    return next(csv.reader(text.splitlines()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path, help="measured rows; columns: docs/simulate-errors.md")
    parser.add_argument("--to", type=Path, required=True, metavar="CSV", help="the table that they are appended to")
    parser.add_argument("--commitment", type=Path, metavar="JSON", help="of benchmarks.twin.predict --commit")
    parser.add_argument("--out", type=Path, metavar="JSON", help="where the outcomes of committed predictions go")
    options = parser.parse_args(argv)
    if options.out and not options.commitment:
        parser.error("--out needs --commitment: outcomes are those of committed predictions")
    try:
        promises, promised = read_commitment(options.commitment) if options.commitment else ({}, {})
        added, known = read_both(options.new, options.to)
        outcomes = outcomes_of(added, promises, known)
        append(added, options.to)
        if options.out:
            write_named(options.out, (json.dumps(record(outcomes, promised), indent=1) + "\n").encode())
    except (SimulationError, OSError) as error:
        tell(str(error))
        return SimulationError.exit_code
    lines = {each.row.id: each.line() for each in outcomes}
    for row in added:
        print_line(lines.get(row.id, f"{row.id}: added"))
    if outcomes:
        middle = median(abs(each.error) for each in outcomes)
        held = sum(each.is_held for each in outcomes)
        print_line(f"predicted before: median error {middle:.1%}, {held} of {len(outcomes)} inside their 90% intervals")
    return 0


if __name__ == "__main__":
    sys.exit(main())
