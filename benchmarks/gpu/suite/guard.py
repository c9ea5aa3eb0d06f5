"""Compare new figures with the last ones of the same GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_LOST = 0.05
"""Share of a rate, or added share of a time, that may be lost without failing."""
WATCHED = {"images/s": 1, "TFLOP/s": 1, "GB/s": 1, "s": -1}
"""Units: 1 if more is better, -1 if less is. Ratios are not watched: a peer may have become faster."""
DIGITS = 9
"""Rounding, so that a loss of exactly 5% passes."""

Case = Mapping[str, Any]
Figure = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """An earlier figure beside the new one, which is None if it was not measured."""

    name: str
    unit: str
    before: float
    now: float | None
    noise: float
    """Distance of the quartiles as a share of the median, for the noisier of the two."""

    @property
    def loss(self) -> float:
        """Return the lost share of the rate, or the added share of the time; negative if it improved."""
        if self.now is None:
            return 1.0
        lost = 1 - self.now / self.before if WATCHED[self.unit] > 0 else self.now / self.before - 1
        return round(lost, DIGITS)

    @property
    def has_lost(self) -> bool:
        return self.loss > MOST_LOST

    def __str__(self) -> str:
        now = "not measured" if self.now is None else f"{self.now:,.4g}"
        change = "" if self.now is None else f", {abs(self.loss):.1%} {'worse' if self.loss > 0 else 'better'}"
        verdict = "LOST " if self.has_lost else "ok   "
        return (
            f"{verdict}{self.name:48} {self.before:>10,.4g} -> {now:>12} {self.unit}{change} (noise {self.noise:.1%})"
        )


def compare_case(before: Case, now: Case) -> list[Comparison]:
    """Compare every watched figure of the earlier record of a case. New figures have nothing to lose."""
    return [
        _compare(name, figure, now["figures"].get(name))
        for name, figure in before["figures"].items()
        if figure["unit"] in WATCHED
    ]


def _compare(name: str, before: Figure, now: Figure | None) -> Comparison:
    noise = max(_noise(each) for each in (before, now) if each is not None)
    return Comparison(name, before["unit"], before["median"], None if now is None else now["median"], noise)


def _noise(figure: Figure) -> float:
    return (figure["q3"] - figure["q1"]) / figure["median"]
