"""Predict steps of systems that were not measured, from rows of systems that were.

    python -m benchmarks.twin.predict --given GIVEN.csv --rows QUESTIONS.csv --out PREDICTED.csv

A row never predicts itself. Columns: docs/simulate-errors.md. --commit also stores the predictions with their digest,
to be published before the answers are; benchmarks.twin.add_rows adds the answers to a table and states the outcome.
"""

import argparse
import collections
import csv
import hashlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.twin.fits import BETTER, FITS, NAMES, SAME_LADDER, SAME_SYSTEM, Prediction, predict_by
from benchmarks.twin.rows import Row, read_given, read_questions
from bigbatch.comm.tuning.commit import source_commit
from bigbatch.errors import SimulationError, print_line, tell
from bigbatch.files import write_named
from bigbatch.words import count

CONTRADICTS = 1.25
"""Least ratio at which two steps of the same system, size, batch and software contradict each other."""
COLUMNS = ("id", "ms_per_step", "low", "high", "extrapolated", "scaled_from")
MAX_NAMED = 5
"""Most rows left out of a table that are named; further ones are counted."""


@dataclass(frozen=True)
class Answers:
    """The predicted rows, and lines about them for the user."""

    predictions: list[Prediction]
    left_out: list[str]
    """Rows of either table that are left out."""
    odd: list[str]
    """Rows that contradict each other or the model, and what is not known of systems."""
    text: str
    """The table that was written."""


def predict_table(given: Path, questions: Path, out: Path, *, fit: str = BETTER) -> Answers:
    """Predict each row of a table from the measured rows of another, and write the third.

    Measured values are read from `given` alone, and a row of it that is also a question does not predict itself.
    Raises: SimulationError for a file that cannot be read, or if no row can be predicted; OSError.
    """
    if any(out.resolve() == path.resolve() for path in (given, questions)):
        raise SimulationError(f"--out {out} would overwrite a table that is read: name another file")
    measured, asked = read_given(given), read_questions(questions)
    predictions, alone = [], []
    for row in asked.rows:
        others = [each for each in measured.rows if each.id != row.id]
        if others:
            predictions.append(predict_by(fit, row, others))
        else:
            alone.append(f"{questions}: row {row.id}: nothing is given but itself")
    left_out = [*_few(measured.unusable), *_few(asked.unusable + alone)]
    if not predictions:
        raise SimulationError(left_out[-1])
    text = table_text(list(map(_line, predictions)))
    write_named(out, text.encode())
    refused = dict.fromkeys(each.refused for each in predictions if each.refused)
    odd = [*_few(contradictions(measured.rows)), *_few(list(refused)), *_unknowns(predictions), *_fits(predictions)]
    return Answers(predictions, left_out, odd, text)


def table_text(lines: Sequence[Sequence[str]]) -> str:
    """Return the text of a table of predictions; a commitment states its SHA-256."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *lines])
    return text.getvalue()


def contradictions(rows: Sequence[Row]) -> list[str]:
    """Return a line for each two measured rows of one system, size, batch and software whose steps differ too much."""
    by: dict[tuple[object, ...], list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row.seconds and (row["ladder"] or row["system"]):
            ladder = (row["ladder"],) if row["ladder"] else tuple(row[name] for name in SAME_LADDER)
            system = tuple(row[name] for name in SAME_SYSTEM)
            by[ladder, system, row.num_devices, row.num_nodes, row.local_batch].append(row)
    lines = []
    for found in by.values():
        least, most = (choose(found, key=lambda row: row.seconds or 0.0) for choose in (min, max))
        ratio = (most.seconds or 0.0) / (least.seconds or 1.0)
        if ratio > CONTRADICTS:
            lines.append(
                f"rows {least.id} and {most.id} contradict each other: the same system, {ratio:.3g} times as slow"
            )
    return lines


def _unknowns(predictions: Sequence[Prediction]) -> list[str]:
    counts = collections.Counter(name for each in predictions for name in each.unknown)
    lines = [f"unknown of {count(number, 'row')}, so its interval is wider: {name}" for name, number in counts.items()]
    if real := sum("real" in each.row["input_data"].lower() for each in predictions):
        lines.append(f"{count(real, 'row')} with real images: compute and communication only, without storage")
    return lines


def _fits(predictions: Sequence[Prediction]) -> list[str]:
    counts = collections.Counter((each.fit, each.why) for each in predictions if each.why)
    return _few([f"{count(number, 'row')} by the {NAMES[fit]}: {why}" for (fit, why), number in counts.items()])


def commitment(answers: Answers) -> dict[str, object]:
    """Return the lines of the table and its SHA-256, which add_rows checks when the answers are known."""
    _, *rows = csv.reader(io.StringIO(answers.text))
    return {
        "sha256": digest(answers.text),
        "commit": source_commit(),
        "predictions": {name: values for name, *values in rows},
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _few(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MAX_NAMED
    return [*lines[:MAX_NAMED], *([f"and {more} more rows of the same table"] if more > 0 else [])]


def _line(each: Prediction) -> Sequence[str]:
    milliseconds = (f"{1e3 * seconds:.6g}" for seconds in (each.seconds, each.low, each.high))
    return (each.row.id, *milliseconds, "yes" if each.is_extrapolated else "no", each.base.id)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--given", type=Path, required=True, metavar="CSV", help="measured rows; columns: docs/simulate-errors.md")
    add("--rows", type=Path, required=True, metavar="CSV", help="rows to be predicted, with the same columns")
    add("--out", type=Path, required=True, metavar="CSV", help="where the predictions go")
    add("--commit", type=Path, metavar="JSON", help="where predictions go with their digest, to be published first")
    add("--fit", choices=FITS, default=BETTER, help="what predicts from two rows of a system (default: better)")
    options = parser.parse_args(argv)
    try:
        answers = predict_table(options.given, options.rows, options.out, fit=options.fit)
        if options.commit:
            write_named(options.commit, (json.dumps(commitment(answers), indent=1) + "\n").encode())
    except (SimulationError, OSError) as error:
        tell(str(error))
        return SimulationError.exit_code
    for line in (*(f"left out: {line}" for line in answers.left_out), *answers.odd):
        print_line(line, file=sys.stderr)
    far = sum(each.is_extrapolated for each in answers.predictions)
    more = (
        f", {far} of them extrapolated: no given row is of the same system, or size or batch lie far off" if far else ""
    )
    print_line(f"{count(len(answers.predictions), 'row')} predicted{more}")
    print_line(f"written: {options.out} (milliseconds of a step; low and high are a 90% interval)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
