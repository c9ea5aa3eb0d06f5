"""Predict steps of systems that were not measured, from rows of systems that were.

    python -m benchmarks.twin.predict --given GIVEN.csv --rows QUESTIONS.csv --out PREDICTED.csv

A row never predicts itself. Columns: docs/simulate-errors.md.
"""

import argparse
import csv
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.twin.rows import Row, read_given, read_questions
from bigbatch.errors import SimulationError, print_line, tell
from bigbatch.launch.simulate.constants import DEFAULTS, Constants
from bigbatch.launch.simulate.show import write
from bigbatch.launch.simulate.step import RATE_SPREAD, Compute, SimulatedStep, fit_compute, reach_of

MOST_DEVICES = 2048
LEAST_BATCH_SHARE, MOST_BATCH_SHARE = 0.1, 2.5
"""Range of local batches, as shares of the scaled row's, that published rows have checked."""

MOST_CORRECTION = 3.0
"""Largest factor by which a second row may change the model's time of a step beyond its images."""

TRUST = 0.5
"""Power of the second row's factor, as that row is noisy, too."""
WEIGHTS = (4.0, 4.0, 2.0, 2.0, 1.0, 1.0)
"""Weights of differences between rows, as Row.alike lists them; another model counts by doublings of operations."""

CORRECTED_DOUBT = 0.8
"""Factor of the doubt about the model's own parts if a second row has checked them. ASSUMED."""


@dataclass(frozen=True)
class Prediction:
    """Prediction of a row; low and high are a 90% interval."""

    row: Row
    base: Row
    step: SimulatedStep
    seconds: float
    low: float
    high: float
    is_extrapolated: bool


def predict_row(question: Row, given: Sequence[Row], constants: Constants = DEFAULTS) -> Prediction:
    """Scale the nearest measured row to the question's size, batch and network.

    The measured row gives the seconds of an image: its step, less the model's time beyond them. A second row of the
    same ladder stretches that rest, by a factor within MOST_CORRECTION.
    Raises: SimulationError if nothing is given.
    """
    measured = [row for row in given if row.seconds is not None]
    if not measured:
        raise SimulationError("no given row has a measured ms_per_step")
    base = min(measured, key=lambda row: _distance(question, row))
    compute = calibrate(base, question, constants)
    step = question.job(constants).simulate(compute, question.local_batch)
    beyond = step.seconds - compute.seconds_per_image * question.local_batch
    second = _second(question, base, measured)
    factor, has_waited = _correction(base, second, constants) if second else (1.0, True)
    if not has_waited:  # the second row says nothing about a wire that was never waited for
        beyond -= step.communication
    seconds = step.seconds + (factor - 1) * beyond
    reach = reach_of(
        step,
        fixed_seconds=compute.fixed_seconds,
        rate=RATE_SPREAD[_kinship(question, base)],
        doubt=CORRECTED_DOUBT if second else 1.0,
    )
    return Prediction(question, base, step, seconds, seconds / reach, seconds * reach, is_extrapolated(question, base))


def calibrate(base: Row, question: Row, constants: Constants = DEFAULTS) -> Compute:
    """Find the seconds of an image for which the base's simulated step equals the measured; for the question's model.

    Another model's images are scaled by their operations, another device's by the published rates of both.
    """
    fixed = base.fixed_seconds(constants)
    assert base.seconds is not None
    found = fit_compute(base.job(constants), fixed, base.local_batch, base.seconds)
    scale = question.shape.operations / base.shape.operations
    if base.device_rate and question.device_rate:
        scale *= base.device_rate / question.device_rate
    return Compute(found.seconds_per_image * scale, question.fixed_seconds(constants))


def is_extrapolated(question: Row, base: Row) -> bool:
    """Return whether no published row checks such a step: another system, a size or a batch beyond all of them."""
    share = question.local_batch / base.local_batch
    return (
        _kinship(question, base) != "ladder"
        or question.shape_name is None
        or question.num_devices > MOST_DEVICES
        or not LEAST_BATCH_SHARE <= share <= MOST_BATCH_SHARE
    )


def _ladders(row: Row) -> set[str]:
    return {row["ladder"], row["null_line"]} - {""}


def _kinship(question: Row, base: Row) -> str:
    is_same_model = question["model"] == base["model"]
    if is_same_model and _ladders(question) & _ladders(base):
        return "ladder"
    is_same_device = question["accelerator"].split("-")[0] == base["accelerator"].split("-")[0]
    return "device" if is_same_device and is_same_model else "other"


def _distance(question: Row, row: Row) -> tuple[float, ...]:
    """Return a sort key of measured rows, fewest assumptions first: one node of the same ladder comes first."""
    kinship = ("ladder", "device", "other").index(_kinship(question, row))
    is_other_ladder = row["ladder"] not in (question["ladder"], question["null_line"])
    differences = (
        sum(weight * (one != other) for weight, one, other in zip(WEIGHTS, question.alike, row.alike, strict=True))
        + abs(math.log2(question.shape.operations / row.shape.operations))
        + abs(math.log2(question.local_batch / row.local_batch)) / 4
        + abs((question.year or 0) - (row.year or 0) if question.year and row.year else 0) / 4
    )
    if kinship == 0:
        # a full node shares what the question's nodes share: memory, hosts, links
        share = abs(math.log2(row.num_devices / row.num_nodes * question.num_nodes / question.num_devices))
        return (kinship, is_other_ladder, row.num_nodes, share, differences)
    return (kinship, differences + (row.num_nodes > 1), row.num_devices, 0.0, 0.0)


def _second(question: Row, base: Row, measured: Sequence[Row]) -> Row | None:
    """Find a measured row of the base's ladder that has crossed the nodes, as the question does."""
    if _kinship(question, base) != "ladder" or question.num_nodes == 1:
        return None
    others = [row for row in measured if row["ladder"] == base["ladder"] and row.num_nodes > base.num_nodes]
    return min(others, key=lambda row: abs(math.log(question.num_devices / row.num_devices)), default=None)


def _correction(base: Row, second: Row, constants: Constants) -> tuple[float, bool]:
    """Return the second row's rest over the model's, and whether it waits for the wire."""
    compute = calibrate(base, second, constants)
    step = second.job(constants).simulate(compute, second.local_batch)
    pictures = compute.seconds_per_image * second.local_batch
    assert second.seconds is not None
    said, found = step.seconds - pictures, second.seconds - pictures
    factor = 1.0
    if said > 0:
        factor = min(MOST_CORRECTION, max(1 / MOST_CORRECTION, found / said)) ** TRUST
    return factor, step.communication > 0


COLUMNS = ("id", "ms_per_step", "low", "high", "extrapolated", "scaled_from")


MOST_NAMED = 5
"""Most rows left out of a table that are named; further ones are counted."""


@dataclass(frozen=True)
class Answers:
    """The predicted rows, and a line for each row of either table that is left out."""

    predictions: list[Prediction]
    left_out: list[str]


def predict_table(given: Path, questions: Path, out: Path) -> Answers:
    """Predict each row of a table from the measured rows of another, and write the third.

    Measured values are read from `given` alone, and a row of it that is also a question does not predict itself.
    Raises: SimulationError for a file that cannot be read or written, or if no row can be predicted.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Predict one table from another, and write the third; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--given", type=Path, required=True, metavar="CSV", help="measured rows; columns: docs/simulate-errors.md")
    add("--rows", type=Path, required=True, metavar="CSV", help="rows to be predicted, with the same columns")
    add("--out", type=Path, required=True, metavar="CSV", help="where the predictions go")
    options = parser.parse_args(argv)
    try:
        answers = predict_table(options.given, options.rows, options.out)
    except SimulationError as error:
        tell(str(error))
        return error.exit_code
    for line in answers.left_out:
        print_line(f"left out: {line}", file=sys.stderr)
    far = sum(each.is_extrapolated for each in answers.predictions)
    more = (
        f", {far} of them extrapolated: no given row is of the same system, or size or batch lie far off" if far else ""
    )
    print_line(f"{len(answers.predictions)} rows predicted{more}")
    print_line(f"written: {options.out} (milliseconds of a step; low and high are a 90% interval)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
