"""What a run has cost over all of its starts, by its records. Pure; imports no torch."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spent:
    """Times between two starts of a run do not count, nor does what a start did again after a checkpoint."""

    hours: float = 0.0
    rank_hours: float = 0.0
    joules: float | None = 0.0
    """In steps; None where a driver did not tell."""


def spent_by(records: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Spent]]:
    """Yield each record of a metrics file, and what the run had cost by then."""
    hours = rank_hours = 0.0
    joules: float | None = 0.0
    before: float | None = None
    ranks = 1
    for record in records:
        if record["kind"] == "start":
            ranks = record["job"].get("world_size", 1)
        # from the record before it to a start nothing ran
        elif before is not None:
            # a clock may be set back, or be another node's
            passed = max(0.0, record["time"] - before) / 3600
            hours, rank_hours = hours + passed, rank_hours + ranks * passed
        before = record["time"]
        if record["kind"] == "train":
            own = record.get("energy_joules")
            joules = None if joules is None or own is None else joules + own
        yield record, Spent(hours, rank_hours, joules)


def spent_in_all(records: Iterable[dict[str, Any]]) -> Spent:
    """Return what the run had cost by the last record."""
    newest = deque((spent for _, spent in spent_by(records)), maxlen=1)
    return newest[0] if newest else Spent()
