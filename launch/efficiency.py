"""Scaling efficiency, and the causes of the loss. Pure.

A step of S seconds is computing + waiting for the wire + waiting for images + waiting for stragglers. The ideal step
with b images per rank takes S0 * b / b0 seconds; S0 and b0 are those at the fewest ranks. Efficiency E is the ideal
step over S. What each part takes beyond its own share of the ideal step, over S, adds up to 1 - E exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bigbatch.words import percent

Variant = tuple[tuple[str, Any], ...]
"""The values of a point except its number of ranks."""
PARTS = ("computing", "communication", "input", "stragglers")
WORTH_NAMING = 0.005
"""A smaller loss, as a share of the step, is not named in a sentence."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step and of its parts; medians over reports."""

    seconds: float
    parts: dict[str, float | None]
    """Seconds of each of PARTS, which add up to seconds; None for a part that is hidden in a CUDA graph."""


@dataclass(frozen=True)
class MeasuredPoint:
    """Measurements of all repeats of one point of a sweep."""

    variant: Variant
    ranks: int
    nodes: int
    global_batch_size: int
    step: Step
    rates: tuple[float, ...]
    """Images per second of each report, over all repeats."""
    fewest_ranks: int
    """Fewest ranks of the points with the same other values, measured or not."""
    joules_per_image: float | None
    """Over all ranks; None if a driver did not report it."""
    device: str
    """Device of a rank, with its threads on a CPU."""
    numbers: tuple[int, ...] = ()
    """Numbers of the sweep's points, one for each seed."""

    @property
    def rate(self) -> float:
        return self.global_batch_size / self.step.seconds

    @property
    def million_images_rank_hours(self) -> float:
        """Return the rank-hours that 10^6 images take."""
        return 1e6 * self.ranks / self.rate / 3600

    @property
    def local_batch(self) -> float:
        return self.global_batch_size / self.ranks


@dataclass(frozen=True)
class Efficiency:
    """A point compared with the point of its variant with the fewest ranks."""

    point: MeasuredPoint
    base: MeasuredPoint
    efficiency: float
    losses: dict[str, float | None]
    """Loss of each of PARTS as a share of the step; negative if a part takes less than in the ideal step; None if
    it was not measured."""

    @property
    def lacks_base(self) -> bool:
        """Return whether the point with the fewest ranks has no figures, so that the next one is the base."""
        return self.base.ranks > self.base.fewest_ranks

    @property
    def unsplit(self) -> float | None:
        """Return the total loss of the parts that were not measured; None if all were."""
        if None not in self.losses.values():
            return None
        return 1 - self.efficiency - sum(share for share in self.losses.values() if share is not None)

    @property
    def speedup(self) -> float:
        return self.point.rate / self.base.rate

    def name_of(self, part: str) -> str:
        if part == "computing":
            return "smaller local batch" if self.point.local_batch < self.base.local_batch else "slower computing"
        return {"communication": "exposed communication", "input": "input", "stragglers": "stragglers"}[part]

    @property
    def lost_to(self) -> str:
        """Return a sentence that names the losses, the largest first; empty if none is worth naming."""
        lost = {self.name_of(part): share for part, share in self.losses.items() if share and share >= WORTH_NAMING}
        named = sorted(lost, key=lambda name: -lost[name])
        return f" Lost to {', '.join(f'{name} ({percent(lost[name])})' for name in named)}." if named else ""


def median_step(records: Sequence[dict[str, Any]], *, global_batch_size: int) -> Step:
    """Return the step with the median seconds and parts of train records; computing is the rest."""
    seconds = median(global_batch_size / record["images_per_second"] for record in records)
    keys = {"communication": "wire_wait_fraction", "input": "input_wait_fraction", "stragglers": "straggler_fraction"}
    shares = {part: _median([record[key] for record in records]) for part, key in keys.items()}
    known = [share for share in shares.values() if share is not None]
    # computing is the rest, so that the parts add up
    shares["computing"] = 1 - sum(known) if len(known) == len(keys) else None
    return Step(seconds, {part: None if share is None else seconds * share for part, share in shares.items()})


def _median(shares: Sequence[float | None]) -> float | None:
    """Return the median; None if a report lacks its share."""
    known = [share for share in shares if share is not None]
    return median(known) if len(known) == len(shares) else None


def compare(points: Sequence[MeasuredPoint]) -> list[Efficiency]:
    """Compare each point with the base of its variant, also the base itself; sorted by variant and ranks."""
    variants: dict[Variant, list[MeasuredPoint]] = {}
    for point in points:
        variants.setdefault(point.variant, []).append(point)
    found = []
    for same in variants.values():
        ordered = sorted(same, key=lambda point: point.ranks)
        found += [efficiency_of(point, ordered[0]) for point in ordered]
    return found


def efficiency_of(point: MeasuredPoint, base: MeasuredPoint) -> Efficiency:
    """Compare a point with its base: efficiency in images per second and rank, and the loss of each part."""
    # a larger batch alone is not a loss: the loss is the time beyond the base's step, scaled to this batch
    scale = point.local_batch / base.local_batch
    losses: dict[str, float | None] = {}
    for part in PARTS:
        own, ideal = point.step.parts[part], base.step.parts[part]
        losses[part] = None if own is None or ideal is None else (own - scale * ideal) / point.step.seconds
    return Efficiency(point, base, scale * base.step.seconds / point.step.seconds, losses)


def by_variant(found: Sequence[Efficiency]) -> dict[str, list[Efficiency]]:
    """Group points by the label of their variant."""
    groups: dict[str, list[Efficiency]] = {}
    for each in found:
        groups.setdefault(variant_name(each), []).append(each)
    return groups


def variant_name(each: Efficiency) -> str:
    return ", ".join(f"{value}" for _, value in each.point.variant) or "all"
