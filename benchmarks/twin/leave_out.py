"""Leave one family out: choose the model's constants and the width of intervals from all other families.

Each fitted constant in turn is tried at FACTORS of its value, and the mean error of the other families decides. A
constant that concerns no other family gets the value that costs nothing.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from benchmarks.twin.hardware import DEFAULTS, RowConstants
from benchmarks.twin.predict import Prediction, nearest, simulated_seconds
from benchmarks.twin.rows import Row

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


def distance(prediction: Prediction) -> float:
    """Return the distance of the measured step from the predicted one, in half intervals."""
    seconds = prediction.row.seconds
    assert seconds is not None
    bound = prediction.high if seconds > prediction.seconds else prediction.low
    return abs(math.log(seconds / prediction.seconds)) / abs(math.log(bound / prediction.seconds))


def factor_of(distances: Mapping[object, Sequence[float]]) -> float:
    """Return the least factor of half intervals that then contain STATED of the rows; all systems weigh the same."""
    weighted = sorted((each, 1 / len(found)) for found in distances.values() for each in found)
    needed = STATED * sum(weight for _, weight in weighted)
    for each, weight in weighted:
        needed -= weight
        if needed <= 1e-9:
            return each
    return 1.0


def held_without(predictions: Sequence[Prediction]) -> tuple[dict[str, bool], dict[str, float], dict[str, float]]:
    """Widen each prediction's interval by the factor that all other families give for its kind.

    Returns: row's name -> whether the interval holds; row's name -> its half width as a logarithm; kind -> the factor
    that all families give.
    """
    by: dict[str, dict[tuple[str, str], list[Prediction]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for each in predictions:
        by[each.kind][each.row["family"], each.row.carrier].append(each)
    held, widths = {}, {}
    for systems in by.values():
        for family in {family for family, _ in systems}:
            factor = factor_of({k: [*map(distance, v)] for k, v in systems.items() if k[0] != family})
            for each in (each for key, found in systems.items() if key[0] == family for each in found):
                held[each.row.id] = distance(each) <= factor
                widths[each.row.id] = factor * math.log(each.high / each.low) / 2
    factors = {kind: factor_of({k: [*map(distance, v)] for k, v in systems.items()}) for kind, systems in by.items()}
    return held, widths, factors
