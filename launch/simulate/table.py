"""`bigbatch simulate --given ... --rows ...`: a table of questions in, a table of predicted steps out."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import SimulationError
from bigbatch.launch.simulate.predict import Prediction, predict_row
from bigbatch.launch.simulate.rows import read_given, read_questions
from bigbatch.launch.simulate.show import write

COLUMNS = ("id", "ms_per_step", "low", "high", "extrapolated", "scaled_from")


def predict_table(given: Path, questions: Path, out: Path) -> list[Prediction]:
    """Predict each row of a table from the measured rows of another, and write the third.

    Measured values are read from `given` alone, and a row of it that is also a question predicts not itself.
    Raises: SimulationError for a file that cannot be read or written.
    """
    if any(out.resolve() == path.resolve() for path in (given, questions)):
        raise SimulationError(f"--out {out} would overwrite a table that is read: name another file")
    measured = read_given(given)
    predictions = [
        predict_row(row, [each for each in measured if each.id != row.id]) for row in read_questions(questions)
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *map(_line, predictions)])
    write(out, text.getvalue())
    return predictions


def _line(each: Prediction) -> Sequence[str]:
    milliseconds = (f"{1e3 * seconds:.6g}" for seconds in (each.seconds, each.low, each.high))
    return (each.row.id, *milliseconds, "yes" if each.is_extrapolated else "no", each.base.id)
