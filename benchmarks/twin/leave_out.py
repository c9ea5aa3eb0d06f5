"""Leave one family out: choose the model's constants and the width of intervals from all other families.

Each fitted constant in turn is tried at FACTORS of its value, and the mean error of the other families decides. A
constant that concerns no other family gets the value that costs nothing.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from benchmarks.twin.fits import Prediction, nearest, simulated_seconds
from benchmarks.twin.hardware import DEFAULTS, RowConstants
from benchmarks.twin.rows import Row
from bigbatch.tools.simulate.interval import UNCHECKED_REACH

FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
UNSEEN = {
    "seconds_per_tensor": 0.0,
    "eager_seconds_per_tensor": 0.0,
    "host_bytes_per_second": 1e12,
    "host_node_seconds": 0.0,
    "straggler_share": 0.0,
    "input_share": 0.0,
}
"""Fitted constant -> the value at which it costs nothing, for families that alone show the constant."""
MAX_ERROR = 0.7
"""Largest error, as a logarithm, that counts: a row that no constant explains must not choose one."""
MIN_GAIN = 2e-4
"""Least decrease of the mean error for which another value is taken."""
MIN_MOVE = 1e-4
"""Least change of a step, as a share of it, by which a constant concerns it."""
STATED = 0.9
"""The coverage that intervals state."""
ONE_END = (1 + STATED) / 2
"""Share of rows that one end of an interval leaves on its inner side."""
UNCHECKED = "unchecked"
"""Group of rows of carriers and frameworks with few published measurements."""


@dataclass
class Steps:
    """Rows to predict, each with its nearest measured row, and their errors by the constants that concern them."""

    rows: Sequence[Row]
    given: Sequence[Row]
    _bases: dict[str, Row] = field(default_factory=dict)
    _errors: dict[tuple[object, ...], float] = field(default_factory=dict)
    _concern: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bases = {row.id: nearest(row, self.given) for row in self.rows}
        plain = {row.id: self._predict(row, DEFAULTS) for row in self.rows}
        for name in UNSEEN:
            moved = replace(DEFAULTS, **{name: 1.5 * getattr(DEFAULTS, name)})
            self._concern[name] = {
                row.id for row in self.rows if abs(self._predict(row, moved) - plain[row.id]) > MIN_MOVE
            }

    def families(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = collections.defaultdict(list)
        for row in self.rows:
            found[row["family"]].append(row)
        return found

    def concerns(self, name: str, row: Row) -> bool:
        return row.id in self._concern[name]

    def error(self, row: Row, constants: RowConstants) -> float:
        """Return the logarithm of measured over predicted seconds."""
        key = (row.id, *(getattr(constants, name) for name in UNSEEN if self.concerns(name, row)))
        if key not in self._errors:
            self._errors[key] = self._predict(row, constants)
        return self._errors[key]

    def _predict(self, row: Row, constants: RowConstants) -> float:
        assert row.seconds is not None
        return math.log(row.seconds / simulated_seconds(row, self._bases[row.id], constants))


def constants_without(steps: Steps, family: str | None) -> RowConstants:
    """Return the constants with the least mean error over all families except family."""
    others = [rows for name, rows in steps.families().items() if name != family]

    def loss(constants: RowConstants) -> float:
        return fmean(fmean(min(abs(steps.error(row, constants)), MAX_ERROR) for row in rows) for rows in others)

    found = DEFAULTS
    for name, unseen in UNSEEN.items():
        if not any(steps.concerns(name, row) for rows in others for row in rows):
            found = replace(found, **{name: unseen})
            continue
        for factor in FACTORS:
            value = replace(found, **{name: factor * getattr(DEFAULTS, name)})
            found = value if loss(value) < loss(found) - MIN_GAIN else found
    return found


def error_of(prediction: Prediction) -> float:
    """Return the logarithm of measured over predicted seconds."""
    assert prediction.row.seconds is not None
    return math.log(prediction.row.seconds / prediction.seconds)


def distance(prediction: Prediction) -> float:
    """Return the distance of the measured step from the predicted one, in half intervals of a checked carrier."""
    error = error_of(prediction)
    return abs(error) / prediction.reaches[error > 0]


def quantile_of(values: Mapping[object, Sequence[float]], share: float) -> float | None:
    """Return the least value that is not below a share of all, each system with the same weight; None of none."""
    weighted = sorted((each, 1 / len(found)) for found in values.values() for each in found)
    needed = share * sum(weight for _, weight in weighted)
    for each, weight in weighted:
        needed -= weight
        if needed <= 1e-9:
            return each
    return None


def calibrated(predictions: Sequence[Prediction], family: str | None = None) -> tuple[dict[str, float], float, float]:
    """Return what families other than family give: a factor of intervals by kind, and UNCHECKED_REACH below and above.

    The factors contain STATED of the rows. Each end of UNCHECKED_REACH excludes half of the others.
    """
    groups: dict[str, dict[object, list[Prediction]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for each in predictions:
        if each.row["family"] != family:  # strangers vary more than rows of carriers with few measurements
            group = UNCHECKED if each.row.unchecked and each.kind == "same_system" else each.kind
            groups[group][each.row["family"], each.row.carrier].append(each)
    errors = {key: [*map(error_of, found)] for key, found in groups.pop(UNCHECKED, {}).items()}
    negative = {key: [-each for each in found] for key, found in errors.items()}
    ends = quantile_of(negative, ONE_END), quantile_of(errors, ONE_END)
    below, above = (least if end is None else max(0.0, end) for end, least in zip(ends, UNCHECKED_REACH, strict=True))
    distances = {kind: {key: [*map(distance, found)] for key, found in each.items()} for kind, each in groups.items()}
    return {kind: quantile_of(each, STATED) or 1.0 for kind, each in distances.items()}, below, above


def reaches_without(predictions: Sequence[Prediction], ladders: Sequence[Prediction]) -> dict[str, tuple[float, float]]:
    """Return by row the half widths, below and above as logarithms, of the interval that all other families give.

    ladders: predictions from rows of the same system; their families set the widths of UNCHECKED.
    """
    found = {}
    for family in {each.row["family"] for each in predictions}:
        factors, *_ = calibrated(predictions, family)
        _, *least = calibrated(ladders, family)
        for each in (each for each in predictions if each.row["family"] == family):
            below, above = (factors.get(each.kind, 1.0) * reach for reach in each.reaches)
            if each.row.unchecked:
                below, above = max(below, least[0]), max(above, least[1])
            found[each.row.id] = below, above
    return found
