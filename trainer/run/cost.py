"""What a run has cost over all of its starts, by its records. Pure; imports no torch."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bigbatch.numbers import is_measure

ELAPSED = "elapsed_seconds"
"""Key of a record of metrics.jsonl: seconds since this start of the run, by a monotonic clock."""


@dataclass(frozen=True)
class Spent:
    """Times between two starts of a run do not count, nor does what a start did again after a checkpoint."""

    hours: float = 0.0
    rank_hours: float = 0.0
    joules: float | None = 0.0
    """In steps; None where a driver did not tell."""


def durations(records: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield each record of a metrics file with the seconds since the record before it; 0 for the first.

    Within a start of the run they are those of its monotonic clock. The time of day, which may be set meanwhile, counts
    between two starts and for records of older releases, which hold nothing else. Records of a damaged file
    whose times are no numbers are left out.
    """
    before: dict[str, Any] = {}
    for record in records:
        if not all(is_measure(record.get(name, 0.0)) for name in (ELAPSED, "time")) or "time" not in record:
            continue
        is_timed = record["kind"] != "start" and ELAPSED in record and ELAPSED in before
        name = ELAPSED if is_timed else "time"
        yield record, max(0.0, record[name] - before.get(name, record[name]))
        before = record


def spent_by(records: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Spent]]:
    """Yield each record of a metrics file, and what the run had cost by then."""
    hours = rank_hours = 0.0
    joules: float | None = 0.0
    ranks = 1
    for record, seconds in durations(records):
        if record["kind"] == "start":
            ranks = record["job"].get("world_size", 1)
        # nothing ran between a start and the record before it
        else:
            hours, rank_hours = hours + seconds / 3600, rank_hours + ranks * seconds / 3600
        if record["kind"] == "train":
            own = record.get("energy_joules")
            joules = None if joules is None or own is None else joules + own
        yield record, Spent(hours, rank_hours, joules)


def spent_in_all(records: Iterable[dict[str, Any]]) -> Spent:
    """Return what the run had cost by the last record."""
    newest = deque((spent for _, spent in spent_by(records)), maxlen=1)
    return newest[0] if newest else Spent()
