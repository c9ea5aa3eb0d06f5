"""Check rows that others have measured, add them to a table, and state how committed predictions fared.

    python -m benchmarks.twin.add_rows NEW.csv --to ROWS.csv [--commitment PREDICTIONS.json]

A row is refused if a required value is missing or impossible, its units contradict each other, its name is taken, or it
contradicts a row of the table.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.twin.predict import contradictions, digest, table_text
from benchmarks.twin.rows import Row, read_given
from bigbatch.errors import SimulationError, first_line, print_line, tell

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


def outcome(row: Row, committed: Sequence[float]) -> str:
    """Compare a measured row with its committed milliseconds: predicted, low and high."""
    assert row.seconds is not None
    predicted, low, high = committed
    measured = 1e3 * row.seconds
    where = "inside" if low <= measured <= high else "outside"
    return (
        f"{row.id}: {predicted:.4g} ms predicted ({low:.4g} to {high:.4g}), {measured:.4g} measured: "
        f"{predicted / measured - 1:+.1%}, {where} the interval"
    )


def read_commitment(path: Path) -> dict[str, tuple[float, float, float]]:
    """Return the committed milliseconds of each row.

    Raises: SimulationError if the file cannot be read, or if its predictions are not those of its digest.
    """
    found = {}
    try:
        stored = json.loads(path.read_text())
        lines = stored["predictions"].items()
        is_changed = digest(table_text([(name, *values) for name, values in lines])) != stored["sha256"]
        for name, values in lines:
            predicted, low, high = map(float, values[:3])
            found[name] = predicted, low, high
    except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise SimulationError(f"cannot read {path}: {first_line(error)}") from error
    if is_changed:
        raise SimulationError(f"the predictions in {path} are not those of its sha256: they were changed later")
    return found


def add_rows(new: Path, table: Path) -> list[Row]:
    """Check a file's rows and append them to a table, in its columns. Raises: SimulationError."""
    found, known = read_given(new), read_given(table)
    if found.unusable:
        raise SimulationError(found.unusable[0])
    check_new(found.rows, known.rows)
    text = table.read_text(encoding="utf-8-sig")
    columns = next(csv.reader(text.splitlines()))
    if unknown := [name for name in found.rows[0].stated if name not in columns]:
        raise SimulationError(f"{new} has a column {unknown[0]} that {table} has not")
    with table.open("a", newline="", encoding="utf-8") as file:
        file.write("" if text.endswith("\n") else "\n")
        csv.DictWriter(file, columns, lineterminator="\n").writerows(dict(row.stated) for row in found.rows)
    return found.rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path, help="measured rows; columns: docs/simulate-errors.md")
    parser.add_argument("--to", type=Path, required=True, metavar="CSV", help="the table that they are appended to")
    parser.add_argument("--commitment", type=Path, metavar="JSON", help="of benchmarks.twin.predict --commit")
    options = parser.parse_args(argv)
    try:
        committed = read_commitment(options.commitment) if options.commitment else {}
        added = add_rows(options.new, options.to)
    except (SimulationError, OSError) as error:
        tell(str(error))
        return SimulationError.exit_code
    for row in added:
        print_line(outcome(row, committed[row.id]) if row.id in committed else f"{row.id}: added")
    return 0


if __name__ == "__main__":
    sys.exit(main())
