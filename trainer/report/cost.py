"""Cost of a run over all its starts (seconds, energy), from its records. Pure; does not import torch."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bigbatch.words import is_number

ELAPSED = "elapsed_seconds"
"""Key in metrics.jsonl: seconds since this start of the run, by a monotonic clock."""


@dataclass(frozen=True)
class Spent:
    """Cost of a run, without the time between its starts and without repeated steps."""

    hours: float = 0.0
    rank_hours: float = 0.0
    joules: float | None = 0.0
    """Energy of the steps; None if a driver did not report it."""


def durations(records: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield each record of a metrics file with the seconds since the previous record; 0 for the first.

    Uses the monotonic clock within a start of the run. Between two starts it uses the time of day, which may have been
    changed. Leaves out records whose times are not numbers.
    """
    before: dict[str, Any] = {}
    for record in records:
        if not all(is_number(record.get(name, 0.0)) for name in (ELAPSED, "time")) or "time" not in record:
            continue
        is_timed = record["kind"] != "start" and ELAPSED in record and ELAPSED in before
        name = ELAPSED if is_timed else "time"
        yield record, max(0.0, record[name] - before.get(name, record[name]))
        before = record


def spent_by(records: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Spent]]:
    """Yield each record of a metrics file with the run's cost up to it."""
    hours = rank_hours = 0.0
    joules: float | None = 0.0
    ranks = 1
    for record, seconds in durations(records):
        if record["kind"] == "start":
            ranks = record["job"].get("world_size", 1)
        # nothing ran between the previous record and a start, unless the same processes continued
        if record["kind"] != "start" or record.get("is_healed") is True:
            hours, rank_hours = hours + seconds / 3600, rank_hours + ranks * seconds / 3600
        if record["kind"] == "train":
            own = record.get("energy_joules")
            joules = None if joules is None or own is None else joules + own
        yield record, Spent(hours, rank_hours, joules)


def total_spent(records: Iterable[dict[str, Any]]) -> Spent:
    """Return the cost up to the last record."""
    newest = deque((spent for _, spent in spent_by(records)), maxlen=1)
    return newest[0] if newest else Spent()
