"""How far the work on a data set is, on the error stream: a bar on a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int], None]
"""Takes (done, total)."""


@contextmanager
def show_progress(title: str, *, unit: str = "pictures") -> Iterator[Advance]:
    """A bar with units per second; where no terminal is, a line at every tenth of the work."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True), title, unit)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task, rate = progress.add_task(title, total=None, rate=""), _Rate(unit)
        yield lambda done, total: progress.update(task, completed=done, total=total, rate=rate.after(done))


def _lines(say: Callable[[str], None], title: str, unit: str) -> Advance:
    tenths_said = 0

    def advance(done: int, total: int) -> None:
        nonlocal tenths_said
        if (tenths := 10 * done // total) > tenths_said:
            tenths_said = tenths
            say(f"{title}: {done:,} of {total:,} {unit}")

    return advance


class _Rate:
    """Units per second since the first call: what was done before it may be the work of an earlier process."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._first: tuple[int, float] | None = None

    def after(self, done: int) -> str:
        """The rate as text; empty at the first call."""
        now = time.monotonic()
        if self._first is None:
            self._first = done, now
        first_done, start = self._first
        return f"{(done - first_done) / (now - start):,.0f} {self._unit}/s" if done > first_done else ""
