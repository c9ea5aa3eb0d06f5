"""Show progress of work on a data set on stderr: a bar on a terminal, else lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bigbatch.errors import printable
from bigbatch.trainer.datasets.processes import Advance

Report = Callable[[str, int, int], None]
"""Takes (kind of work, done so far, in all); called often, by the thread that started the work."""


@contextmanager
def show_progress(title: str, *, unit: str = "images") -> Iterator[Advance]:
    """Show one bar, or its lines, with units per second."""
    with show_each(unit=unit) as report:
        yield partial(report, title)


@contextmanager
def show_each(*, unit: str = "") -> Iterator[Report]:
    """Show a bar per kind of work, with units per second if named; without a terminal, a line at every tenth."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True), unit)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[so_far]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        tasks: dict[str, tuple[TaskID, int, float]] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(printable(what), so_far=""), done, time.monotonic()
            # the rate is that since the first call: earlier work may be another process's
            task, first_done, start = tasks[what]
            so_far = f"{done / max(total, 1):.0%}"
            if unit:
                so_far = f"{done:,}/{total:,}"
                if done > first_done:
                    so_far += f" {(done - first_done) / (time.monotonic() - start):,.0f} {unit}/s"
            progress.update(task, completed=done, total=total, so_far=so_far)

        yield report


def _lines(say: Callable[[str], None], unit: str) -> Report:
    tenths_said: dict[str, int] = {}

    def report(what: str, done: int, total: int) -> None:
        if (tenths := 10 * done // total) > tenths_said.get(what, 0):
            tenths_said[what] = tenths
            say(f"{printable(what)}: {done:,} of {total:,} {unit}".rstrip())

    return report
