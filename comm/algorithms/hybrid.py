"""Choose the all-reduce algorithm by size, from a table made of measured times."""

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_TOLERANCE = 0.01
"""Relative gain below which a switch of algorithm never pays."""
MAX_TOLERANCE = 0.04
"""Limit for noisy times: no choice but the default is slower than the fastest median by more."""
TWO_ERRORS = 2 * 1.253 / 1.349
"""Two standard errors of a median over its times' spread / sqrt(n): for n normal values, 1.253 * sigma / sqrt(n) and
1.349 * sigma."""


@dataclass(frozen=True)
class HybridRow:
    """Algorithm for the sizes up to and including up_to_bytes, or for all remaining sizes (None)."""

    up_to_bytes: int | None
    algorithm: str


def _is_row(row: Any) -> bool:
    # by type(): a bool is an int to isinstance
    is_pair = isinstance(row, list) and len(row) == 2
    return is_pair and type(row[0]) in (int, type(None)) and isinstance(row[1], str)


@dataclass(frozen=True)
class HybridTable:
    """Table of the algorithm for each size. Rows ascend; only the last one has no upper limit.

    Raises: ValueError for rows that leave a size without an algorithm, or that name "hybrid" itself.
    """

    rows: tuple[HybridRow, ...]

    def __post_init__(self) -> None:
        limits = [row.up_to_bytes for row in self.rows]
        finite = [limit for limit in limits if limit is not None]
        if not limits or limits[-1] is not None or len(finite) != len(limits) - 1:
            raise ValueError("a hybrid table needs rows, and only the last has up_to_bytes=null")
        if any(a >= b for a, b in zip([0, *finite], finite, strict=False)):
            raise ValueError(f"up_to_bytes of a hybrid table must be positive and ascend, not {finite}")
        if "hybrid" in self.algorithms:
            raise ValueError("a hybrid table chooses between other algorithms than hybrid")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Return the algorithms that the table uses, each once."""
        return tuple(dict.fromkeys(row.algorithm for row in self.rows))

    def choose(self, num_bytes: int) -> str:
        limits = [row.up_to_bytes for row in self.rows[:-1]]
        return self.rows[bisect.bisect_left(limits, num_bytes)].algorithm  # type: ignore[type-var]

    def as_rows(self) -> list[list[Any]]:
        """Return JSON values that from_rows reads."""
        return [[row.up_to_bytes, row.algorithm] for row in self.rows]

    @staticmethod
    def from_rows(rows: object) -> "HybridTable":
        """Read the values of as_rows. Raises: ValueError if they are not such a table."""
        if not isinstance(rows, list) or not all(map(_is_row, rows)):
            raise ValueError('a hybrid table is a list such as [[65536, "doubling"], [null, "ring"]]')
        return HybridTable(tuple(HybridRow(limit, name) for limit, name in rows))

    def __str__(self) -> str:
        spans = [f"{row.algorithm} up to {row.up_to_bytes:,} bytes" for row in self.rows[:-1]]
        return "; ".join([*spans, f"{self.rows[-1].algorithm} {'above' if spans else 'at any size'}"])


@dataclass(frozen=True)
class MeasuredTimes:
    """Repeated times of one algorithm at one size, in seconds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median; of an even number of times, the mean of the middle two."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Return the distance of the quartiles over the median: a single slow repetition hardly moves them."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    @property
    def noise(self) -> float:
        """Return the relative uncertainty of the median: two standard errors, estimated from the quartiles."""
        return TWO_ERRORS * self.spread / math.sqrt(len(self.seconds))

    def joint_noise(self, other: "MeasuredTimes") -> float:
        """Return the relative uncertainty of the ratio of both medians; a single time has the spread of the other."""
        pairs = ((self, other), (other, self))
        errors = ((a if len(a.seconds) > 1 else b).spread / math.sqrt(len(a.seconds)) for a, b in pairs)
        return TWO_ERRORS * math.hypot(*errors)


Times = Mapping[int, Mapping[str, MeasuredTimes]]
"""Size in bytes -> algorithm -> its times."""


def make_hybrid(times: Times, *, default: str = "") -> HybridTable:
    """Return the table with the fewest switches whose choice is near the fastest at every measured size.

    Near means within that size's noise, and at most MAX_TOLERANCE but for the default algorithm, which stays unless
    another one is faster beyond noise. Of tables with equally many switches, the one with more of the default wins,
    then the fastest. Between two sizes with different choices the limit is the size at which both take equally long.
    Raises: ValueError without any size, or for a size without any time.
    """
    if not times or not all(times.values()):
        raise ValueError("a hybrid table needs the time of at least one algorithm at every size")
    sizes = sorted(times)
    choices = _fewest_switches([_near_best(times[size], default) for size in sizes], default)
    rows = [
        HybridRow(_crossing((a, times[a]), (b, times[b]), choice, following), choice)
        for a, b, choice, following in zip(sizes, sizes[1:], choices, choices[1:], strict=False)
        if choice != following
    ]
    return HybridTable((*rows, HybridRow(None, choices[-1])))


def _crossing(
    smaller: tuple[int, Mapping[str, MeasuredTimes]],
    larger: tuple[int, Mapping[str, MeasuredTimes]],
    first: str,
    second: str,
) -> int:
    """Return the size above which second is faster, if the ratio of both times is a power of the size.

    It is the geometric mean of both sizes if an algorithm was not measured at both, or the ratio does not cross 1.
    """
    (a, at_a), (b, at_b) = smaller, larger
    share = 0.5
    if {first, second} <= at_a.keys() & at_b.keys():
        gains = [math.log(at[second].median / at[first].median) for at in (at_a, at_b)]
        # second is slower at the smaller size and faster at the larger one
        if gains[0] > 0 > gains[1]:
            share = gains[0] / (gains[0] - gains[1])
    # up_to_bytes is inclusive: size a keeps first, and size b must keep second
    return min(max(round(a * (b / a) ** share), a), b - 1)


def _near_best(at_size: Mapping[str, MeasuredTimes], default: str) -> dict[str, float]:
    """Return the algorithms that are within the noise of the fastest, each with its relative loss."""
    best, near = min(at_size.values(), key=lambda each: each.median), {}
    for name, measured in at_size.items():
        loss, noise = measured.median / best.median - 1, max(measured.joint_noise(best), MIN_TOLERANCE)
        if loss <= (noise if name == default else min(noise, MAX_TOLERANCE)):
            near[name] = loss
    return near


def _fewest_switches(allowed: Sequence[Mapping[str, float]], default: str) -> list[str]:
    """Choose a name per size by dynamic programming: the fewest switches, most of the default, the least losses."""
    paths: dict[str, tuple[int, int, float, list[str]]] = {"": (-1, 0, 0.0, [])}
    for step in allowed:
        extended = {}
        for name, loss in step.items():
            switches, others, total, path = min(
                (switches + (last != name), others, total, path)
                for last, (switches, others, total, path) in paths.items()
            )
            extended[name] = (switches, others + (name != default), total + loss, [*path, name])
        paths = extended
    return min(paths.values())[3]
