"""Fits by which a row predicts another one: the simulator, fitted to one row, or a straight line through two."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.twin.hardware import DEFAULTS, RowConstants
from benchmarks.twin.rows import Row
from bigbatch.errors import SimulationError
from bigbatch.tools.simulate.interval import FACTORS, RATE_SPREAD, Interval, Uncertainty, interval_of
from bigbatch.tools.simulate.step import Compute, SimulatedStep, fit_compute

MAX_DEVICES = 2048
MIN_BATCH_SHARE, MAX_BATCH_SHARE = 0.1, 2.5
"""Range of local batches, as shares of the scaled row's, that published rows have checked."""

NOISE = 0.03
"""Standard deviation of a measured step, as a share of it. PUBLISHED: runs of one row spread by 0.1 to 8%."""
ANOMALOUS = 3.0
"""Least distance of a second row from its prediction, in half intervals, at which it contradicts the model."""
SAME_SYSTEM = ("system", "accelerator", "framework", "collective_library_version", "precision", "model")
"""Columns that are equal in rows of the same system and software, and on the same ladder."""
SAME_LADDER = ("intra_node_link", "inter_node_link", "inter_node_gbit_per_s", "input_data", "fusion")
"""Columns that are equal, too, if no ladder is stated."""
WEIGHTS = (4.0, 4.0, 2.0, 2.0, 1.0, 1.0)
"""Weights of differences between rows, as Row.alike lists them; another model counts by doublings of operations."""

CORRECTED_DOUBT = 0.8
"""Factor of an interval's width if a second row inside its own interval has corrected the prediction. ASSUMED."""

BETTER, SIMULATOR, LINE = FITS = ("better", "simulator", "line")
"""What predicts: the simulator, a straight line through two rows, or the one that predicts these rows better."""
NAMES = {SIMULATOR: "simulator", LINE: "straight line through two rows"}


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
    kind: str
    """A key of FACTORS."""
    reaches: tuple[float, float]
    """Half widths below and above without UNCHECKED_REACH and second row, as logarithms."""
    unknown: tuple[str, ...] = ()
    """Unknown facts of the system, in words; each widens the interval."""
    refused: str = ""
    """Why a second row was not used, in one line."""
    fit: str = SIMULATOR
    """One of FITS: what predicted the seconds."""
    why: str = ""
    """Why that fit; "" if there was no choice."""


@dataclass(frozen=True)
class _Scaled:
    step: SimulatedStep
    interval: Interval
    factor: float
    """Ratio of the base's measured to its simulated seconds: 1, unless no seconds per image explain the measured."""

    @property
    def seconds(self) -> float:
        return self.factor * self.step.seconds


def predict_row(question: Row, given: Sequence[Row], constants: RowConstants = DEFAULTS) -> Prediction:
    """Scale the nearest measured row to the question's size, batch and network.

    The measured row gives the seconds per image: its step, less the simulated time of all else. A second row of the
    same ladder corrects the prediction by its own error, as far as that exceeds its noise, and widens the interval if
    it is outside its own; a row that contradicts the model is refused, and the interval then contains its error.
    Raises: SimulationError if nothing is given.
    """
    measured = [row for row in given if row.seconds is not None]
    base = nearest(question, measured)
    found, kind = _scaled(question, base, constants), _kind(question, base)
    low, high = (found.factor * seconds for seconds in (found.interval.low, found.interval.high))
    shift, refused = 0.0, ""
    if second := _second(question, base, measured):
        checked = _scaled(second, base, constants)
        assert second.seconds is not None
        error = math.log(second.seconds / checked.seconds)
        refused = _why_refused(second, base, checked)
        if refused:
            low, high = min(low, found.seconds * math.exp(error)), max(high, found.seconds * math.exp(error))
        else:
            of_second, own = (each.interval.above if error > 0 else each.interval.below for each in (checked, found))
            # the share of the error that is not the second row's noise; smaller where the model is more certain
            shift = error * of_second**2 / (of_second**2 + NOISE**2) * min(1.0, own / of_second)
            surprise = abs(error) / (of_second * FACTORS[kind])
            doubt = surprise if surprise > 1 else CORRECTED_DOUBT
            low, high = (found.seconds * math.exp(shift) * (bound / found.seconds) ** doubt for bound in (low, high))
    return Prediction(
        question,
        base,
        found.step,
        found.seconds * math.exp(shift),
        low,
        high,
        is_extrapolated(question, base),
        kind,
        (FACTORS[kind] * found.interval.base[0], FACTORS[kind] * found.interval.base[1]),
        _unknown(question, base),
        refused,
    )


def predict_by(fit: str, question: Row, given: Sequence[Row], constants: RowConstants = DEFAULTS) -> Prediction:
    """Predict by one of FITS; by the simulator if no two usable rows of the question's system are given.

    The two rows are the ones that predict_row uses: the nearest, and one on more nodes. `better` predicts each of them
    from the other by both ways, and takes the one with the smaller mean error (leave-one-out cross-validation).
    Raises: SimulationError if nothing is given.
    """
    measured = [row for row in given if row.seconds is not None]
    found = predict_row(question, measured, constants)
    second = None if found.refused else _second(question, found.base, measured)
    if fit == SIMULATOR or second is None:
        return replace(found, why="a straight line needs a second usable row of the system") if fit == LINE else found
    why = f"--fit {fit}"
    if fit == BETTER:
        errors: dict[str, list[float]] = {SIMULATOR: [], LINE: []}
        for one, other in ((found.base, second), (second, found.base)):
            assert other.seconds is not None
            errors[SIMULATOR].append(abs(math.log(predict_row(other, [one], constants).seconds / other.seconds)))
            errors[LINE].append(abs(math.log(line_seconds(other, one, None) / other.seconds)))
        simulated, straight = (math.expm1(sum(each) / len(each)) for each in errors.values())
        fit = LINE if straight < simulated else SIMULATOR
        why = (
            f"rows {found.base.id} and {second.id}, each predicted from the other: simulator {100 * simulated:.1f}% "
            f"off, straight line {100 * straight:.1f}%"
        )
    if fit == SIMULATOR:
        return replace(found, why=why)
    seconds = line_seconds(question, found.base, second)
    share = seconds / found.seconds
    return replace(found, seconds=seconds, low=share * found.low, high=share * found.high, fit=LINE, why=why)


def line_seconds(question: Row, one: Row, two: Row | None) -> float:
    """Return seconds by a straight line in the local batch through two rows.

    From one row, or two of the same batch, each image takes the first row's seconds per image.
    """
    two = two or one
    assert one.seconds is not None
    assert two.seconds is not None
    slope = one.seconds / one.local_batch
    if one.local_batch != two.local_batch:
        slope = (one.seconds - two.seconds) / (one.local_batch - two.local_batch)
    return two.seconds + slope * (question.local_batch - two.local_batch)


def nearest(question: Row, measured: Sequence[Row]) -> Row:
    """Return the row with the fewest differences. Raises: SimulationError if there is none."""
    if not measured:
        raise SimulationError("no given row has a measured ms_per_step")
    return min(measured, key=lambda row: _distance(question, row))


def simulated_seconds(question: Row, base: Row, constants: RowConstants) -> float:
    """Return the seconds of a question's step, scaled from the base, without second row and interval."""
    step = question.job(constants).simulate(calibrate(base, question, constants), question.local_batch)
    return _unexplained(base, constants) * step.seconds


def _unexplained(base: Row, constants: RowConstants) -> float:
    """Return the ratio of the base's measured to its simulated seconds: 1, unless no seconds per image explain it."""
    assert base.seconds is not None
    simulated = base.job(constants).simulate(calibrate(base, base, constants), base.local_batch)
    return base.seconds / simulated.seconds


def _scaled(question: Row, base: Row, constants: RowConstants) -> _Scaled:
    compute, job = calibrate(base, question, constants), question.job(constants)
    step = job.simulate(compute, question.local_batch)
    uncertainty = Uncertainty(
        RATE_SPREAD[_kinship(question, base)],
        _kind(question, base),
        has_unknown_link=question.has_unknown_link,
        is_unchecked=bool(question.unchecked),
    )
    interval = interval_of(job, compute, step, question.local_batch, uncertainty)
    return _Scaled(step, interval, _unexplained(base, constants))


def _why_refused(second: Row, base: Row, checked: _Scaled) -> str:
    """Return a line if a second row is of other software, or contradicts the model or the first row."""
    assert second.seconds is not None
    if second.software != base.software:
        return f"row {second.id} is of another software version than {base.id}: not used to correct it"
    if second.seconds < (1 - 2 * NOISE) * checked.factor * checked.step.computing:
        return (
            f"row {second.id}: {second.num_nodes} nodes are faster than {base.num_nodes} by row {base.id}, each with "
            "its own images: one of both is wrong, and it is not used"
        )
    error = math.log(second.seconds / checked.seconds)
    bound = checked.interval.high if error > 0 else checked.interval.low
    if abs(error) > ANOMALOUS * abs(math.log(bound / checked.step.seconds)):
        return (
            f"row {second.id} is anomalous: {1e3 * second.seconds:.4g} ms measured, {1e3 * checked.seconds:.4g} ms "
            "predicted from one node; not used, and the interval contains such an error"
        )
    return ""


def _kind(question: Row, base: Row) -> str:
    return "same_system" if _kinship(question, base) == "same_system" else "other_system"


def _unknown(question: Row, base: Row) -> tuple[str, ...]:
    known_rates = question.device_rate and base.device_rate
    is_other = question["accelerator"] != base["accelerator"] and not known_rates
    found = {"the network's rate": question.has_unknown_link, "the device's rate": is_other}
    return (*(name for name, is_unknown in found.items() if is_unknown), *question.unchecked)


def calibrate(base: Row, question: Row, constants: RowConstants = DEFAULTS) -> Compute:
    """Return the seconds per image with which the simulated step of base equals the measured, for question's model.

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
    """Return whether no published row checks such a step: another ladder, or a size or local batch beyond all rows."""
    share = question.local_batch / base.local_batch
    return (
        _kinship(question, base) != "same_system"
        or question.shape_name is None
        or question.num_devices > MAX_DEVICES
        or not MIN_BATCH_SHARE <= share <= MAX_BATCH_SHARE
    )


def _ladders(row: Row) -> set[str]:
    return {row["ladder"], row["null_line"]} - {""}


def _kinship(question: Row, base: Row) -> str:
    is_same_model = question["model"] == base["model"]
    if is_same_model and _ladders(question) & _ladders(base):
        return "same_system"
    is_same_device = question["accelerator"].split("-")[0] == base["accelerator"].split("-")[0]
    return "same_device" if is_same_device and is_same_model else "other_device"


def _distance(question: Row, row: Row) -> tuple[float, ...]:
    """Return a sort key of measured rows, fewest assumptions first: one node of the same ladder comes first."""
    kinship = tuple(RATE_SPREAD).index(_kinship(question, row))
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
    if _kinship(question, base) != "same_system" or question.num_nodes == 1:
        return None
    others = [row for row in measured if row["ladder"] == base["ladder"] and row.num_nodes > base.num_nodes]

    def distance(row: Row) -> tuple[float, float]:
        sizes, batches = question.num_devices / row.num_devices, question.local_batch / row.local_batch
        return abs(math.log(sizes)), abs(math.log(batches))

    return min(others, key=distance, default=None)
