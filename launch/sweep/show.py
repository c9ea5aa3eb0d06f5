"""What a person sees of a sweep: progress, and a table at its end."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from bigbatch.errors import print_line
from bigbatch.launch.sweep.folder import DONE, SweepFolder, read_state, read_summary
from bigbatch.launch.sweep.points import Point
from bigbatch.launch.tables import shown_text
from bigbatch.trainer.config.strict_yaml import as_yaml


class Show:
    """Shows progress over points: a bar in a terminal, a line a point elsewhere."""

    def __init__(self, folder: SweepFolder, *, num_points: int, is_terminal: bool) -> None:
        self._folder = folder
        self._num_points = num_points
        self._ended = 0
        self._start = time.monotonic()
        self._bar = (
            Progress(TextColumn("points"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            if is_terminal and num_points
            else None
        )
        self._task = self._bar.add_task("points", total=num_points) if self._bar else None
        if self._bar:
            self._bar.start()

    def end(self, point: Point, state: dict[str, Any]) -> None:
        """Take note that a point has ended."""
        self._ended += 1
        minutes = (time.monotonic() - self._start) / 60
        left = minutes / self._ended * (self._num_points - self._ended)
        text = (
            f"point {point.number} ({point.describe()}): {outcome(self._folder, state)}; "
            f"{self._ended} of {self._num_points}, about {left:.0f} min left"
        )
        if self._bar and self._task is not None:
            self._bar.console.print(shown_text(text))
            self._bar.advance(self._task)
        else:
            print_line(text)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar:
            self._bar.stop()


def outcome(folder: SweepFolder, state: dict[str, Any]) -> str:
    """Say in some words what came out of one point."""
    if state["state"] != DONE:
        return f"{state['state']}: {state['reason']}" if state["reason"] else str(state["state"])
    summary = read_summary(folder, state["number"]) or {}
    rate = summary.get("images_per_second")
    return f"{rate:,.0f} images/s" if rate else "done"


def print_table(folder: SweepFolder, points: Sequence[Point]) -> None:
    """Print all points, and what came out."""
    keys = list(points[0].values)
    table = Table(Column("point", justify="right"))
    for key in keys:
        is_number = all(type(point.values[key]) in (int, float) for point in points)
        table.add_column(escape(key), justify="right" if is_number else "left")
    for size in ("nodes", "global batch", "microbatch"):
        table.add_column(size, justify="right")
    table.add_column("outcome")
    for point in points:
        state = read_state(folder, point.number) if folder.state(point.number).exists() else None
        batch = point.config.batch
        sizes = (point.nodes, batch.global_batch_size, batch.microbatch_size)
        shown = outcome(folder, state) if state else "missing"
        table.add_row(
            str(point.number),
            *(shown_text(as_yaml(point.values[key])) for key in keys),
            *(f"{size:,}" for size in sizes),
            shown_text(shown),
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
