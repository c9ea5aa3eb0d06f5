"""`bigbatch simulate --given ... --rows ...`: a table of questions in, a table of predicted steps out."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import SimulationError
from bigbatch.launch.simulate.predict import Prediction, predict_row
from bigbatch.launch.simulate.rows import read_given, read_questions
from bigbatch.launch.simulate.show import write

COLUMNS = ("id", "ms_per_step", "low", "high", "extrapolated", "scaled_from")


MOST_NAMED = 5
"""Rows of a table that are left out, of which each is named; more are counted."""


@dataclass(frozen=True)
class Answers:
    """Holds the predicted rows, and a line for each row of either table that is left out."""

    predictions: list[Prediction]
    left_out: list[str]


def predict_table(given: Path, questions: Path, out: Path) -> Answers:
    """Predict each row of a table from the measured rows of another, and write the third.

    Measured values are read from `given` alone, and a row of it that is also a question predicts not itself.
    Raises: SimulationError for a file that cannot be read or written, or where no row can be predicted.
    """
    if any(out.resolve() == path.resolve() for path in (given, questions)):
        raise SimulationError(f"--out {out} would overwrite a table that is read: name another file")
    measured, asked = read_given(given), read_questions(questions)
    predictions, alone = [], []
    for row in asked.rows:
        others = [each for each in measured.rows if each.id != row.id]
        if others:
            predictions.append(predict_row(row, others))
        else:
            alone.append(f"{questions}: row {row.id}: nothing is given but itself")
    left_out = [*_few(measured.unusable), *_few(asked.unusable + alone)]
    if not predictions:
        raise SimulationError(left_out[-1])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *map(_line, predictions)])
    write(out, text.getvalue())
    return Answers(predictions, left_out)


def _few(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MOST_NAMED
    return [*lines[:MOST_NAMED], *([f"and {more} more rows of the same table"] if more > 0 else [])]


def _line(each: Prediction) -> Sequence[str]:
    milliseconds = (f"{1e3 * seconds:.6g}" for seconds in (each.seconds, each.low, each.high))
    return (each.row.id, *milliseconds, "yes" if each.is_extrapolated else "no", each.base.id)
