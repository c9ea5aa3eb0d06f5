"""Terminal output of a sweep: progress, and a table at its end."""

import time
from collections.abc import Sequence
from typing import Any

from bigbatch.cells import columns
from bigbatch.errors import print_line
from bigbatch.experiments.engine.folder import DONE, PENDING, SweepFolder, rate_of
from bigbatch.experiments.engine.growth import GONE, Growth
from bigbatch.experiments.engine.plan import BATCH, RANKS, SweepPlan, describe_values
from bigbatch.experiments.engine.points import Point
from bigbatch.experiments.report.compare import short_key, value_text

TO_TUNE = "to be tuned"


class ProgressDisplay:
    """Prints a line for each point that has ended, with the time that is left."""

    def __init__(self, folder: SweepFolder, *, num_points: int) -> None:
        self._folder = folder
        self._num_points = num_points
        self._ended = 0
        self._start = time.monotonic()

    def skip(self) -> None:
        """Leave a point that ended in an earlier start out of the count."""
        self._num_points -= 1

    def end(self, point: Point, state: dict[str, Any]) -> None:
        """Count a point that has ended, and print its outcome."""
        self._ended += 1
        minutes = (time.monotonic() - self._start) / 60
        left = minutes / self._ended * (self._num_points - self._ended)
        print_line(
            f"point {point.number} ({point.describe()}): {outcome(self._folder, state)}; "
            f"{self._ended} of {self._num_points}, about {left:.0f} min left"
        )


def outcome(folder: SweepFolder, state: dict[str, Any]) -> str:
    if state["state"] != DONE:
        return f"{state['state']}: {state['reason']}" if state["reason"] else str(state["state"])
    summary = folder.read_summary(state["number"]) or {}
    rate, top1 = rate_of(summary), summary.get("top1")
    is_trained = summary.get("loader") != "synthetic" and isinstance(top1, float)
    parts = [f"top-1 {100 * (top1 or 0.0):.2f}%"] if is_trained else []
    return ", ".join([*parts, *([f"{rate:,.0f} images/s"] if rate else [])]) or "done"


def print_table(plan: SweepPlan, folder: SweepFolder, points: Sequence[Point], growth: Growth) -> None:
    """Print what each case changes, all points, and their outcome; without rules, as there may be thousands."""
    for name, changes in plan.cases.items():
        print_line(f"{name}: {describe_values(changes) or 'no change'}")
    if plan.cumulative:
        print_line("each case includes the changes of all before it")
    keys = [key for key in points[0].values if key != BATCH]
    rates = {point.config.schedule.base_lr for point in points}
    head = ["point", *map(short_key, keys), "seed", "ranks", "nodes", "global batch", "microbatch", "rate", "outcome"]
    rows = [head]
    for point in points:
        state = folder.read_state(point.number) if folder.state(point.number).exists() else None
        batch = point.config.batch
        sizes = (point.seed, point.ranks, point.nodes, batch.global_batch_size, batch.microbatch_size)
        result = outcome(folder, state) if state else PENDING
        if growth.has_changed and (now := growth.status[point.number]) != result:
            result = f"{now}; {result}"
        rows.append(
            [
                str(point.number),
                *(value_text(point.values[key]) for key in keys),
                *map(str, sizes),
                TO_TUNE if point.awaits_search else f"{point.config.schedule.base_lr:.4g}",
                result,
            ]
        )
    skipped = {"seed": not points[0].is_seeded, "rate": len(rates) == 1, "ranks": RANKS in keys}
    kept = [index for index, name in enumerate(head) if not skipped.get(name, False) or index <= len(keys)]
    for line in columns([[row[index] for index in kept] for row in rows], right=range(len(kept) - 1)):
        print_line(line)
    for number, values in growth.leaving.items():
        print_line(f"point {number} ({values}): {GONE}")
    for line in growth.describe():
        print_line(line)
