"""Progress of a run on the terminal or in a notebook."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bigbatch.errors import print_line, printable
from bigbatch.parts import load
from bigbatch.words import count, is_number


class Lines:
    """Prints a plain line per report, for logs and pipes, or updates a bar in a notebook's cell. clock: in seconds."""

    def __init__(
        self,
        *,
        num_steps: int,
        first_step: int = 0,
        display: Callable[..., Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """display: IPython's function in a notebook, else None."""
        self._num_steps = num_steps
        self._clock = clock
        self._first: int | None = None
        """Step of the first report: earlier steps are slower (warm-up)."""
        self._reports: deque[tuple[int, float]] = deque()
        """Step and time of the reports in the later half of the steps since the first report."""
        self._cell: Any = display and display(self._bar(first_step, "starting"), raw=True, display_id=True)

    def say(self, text: str) -> None:
        print_line(text)

    def advance(self, record: dict[str, Any]) -> None:
        """Show step, loss, rates, shares, and the remaining time at the pace of the later half, with evaluations."""
        left = self.left(record["step"])
        if self._cell:
            self._cell.update(self._bar(record["step"], describe_briefly(record) + left), raw=True)
        else:
            self.say(f"epoch {record['epoch']:6.2f}  {describe(record)}{left}")

    def left(self, step: int) -> str:
        """Return the remaining time after a report at this step; empty if unknown."""
        now = self._clock()
        self._first = step if self._first is None else self._first
        self._reports.append((step, now))
        while len(self._reports) > 1 and 2 * self._reports[1][0] <= self._first + step:
            self._reports.popleft()
        before, then = self._reports[0]
        if not before < step < self._num_steps:
            return ""
        seconds = (now - then) / (step - before) * (self._num_steps - step)
        return f"  left {timedelta(seconds=round(seconds))}"

    def close(self) -> None:
        pass

    def _bar(self, step: int, text: str) -> dict[str, str]:
        """Return the bar as HTML, and as plain text for frontends without HTML."""
        text = f"{step}/{self._num_steps}  {text}"
        bar = f'<progress value="{step}" max="{self._num_steps}"></progress>'
        return {"text/html": f"<code>{bar} {escape(text)}</code>", "text/plain": text}


class Bar:
    """Rich progress bar with evaluations and other lines above it."""

    def __init__(self, console: Console, *, first_step: int, num_steps: int) -> None:
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=num_steps, completed=first_step)
        self._progress.start()

    def say(self, text: str) -> None:
        self._progress.console.print(printable(text), highlight=False, markup=False)

    def advance(self, record: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=record["step"], description=describe_briefly(record))

    def close(self) -> None:
        self._progress.stop()


class _Terminal(Console):
    """Console that raises BrokenPipeError; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise


MAX_WITHOUT_TOP5 = 5
"""Most classes for which top-5 is not stated: it is always 100%."""


def noise_scale_text(record: Mapping[str, Any], *, unit: str = "") -> str:
    return str(load("bigbatch.trainer.report.noise_scale.describe_noise_scale")(record, unit=unit))


def metric_text(value: Any) -> str:
    return f"{value:.4g}" if is_number(value) else "no value" if value is None else str(value)


def describe(record: dict[str, Any]) -> str:
    noise = f"  noise scale {noise_scale_text(record)}" if "noise_scale" in record else ""
    return (
        f"step {record['step']}  loss {record['loss']:.3f}  top-1 {100 * record['top1']:.1f}%  "
        f"lr {record['lr']:.4g}  {record['images_per_second']:,.0f} images/s  "
        f"input wait {100 * record['input_wait_fraction']:.1f}%  "
        f"exposed communication {_exposed_and_skipped(record)}{noise}"
    )


def describe_briefly(record: dict[str, Any]) -> str:
    """Return one report in 50 columns, which leaves space for a bar in 80."""
    return (
        f"loss {record['loss']:.3f}  {record['images_per_second']:,.0f} images/s  "
        f"wait {100 * record['input_wait_fraction']:.1f}%  exposed {_exposed_and_skipped(record)}"
    )


def _exposed_and_skipped(record: dict[str, Any]) -> str:
    """Return the exposed share of the step, and the number of updates skipped because of fp16 overflow, if any."""
    share = record["exposed_communication_fraction"]
    text = "unknown" if share is None else f"{100 * share:.1f}%"  # not measured in a replayed CUDA graph
    return f"{text}  updates skipped {record['overflow_steps']}" if record["overflow_steps"] else text


def describe_evaluation(record: dict[str, Any], *, num_classes: int) -> str:
    """Return one evaluation as a line; without top-5 for at most five classes."""
    top5 = f"top-5 {100 * record['top5']:.2f}%  " if num_classes > MAX_WITHOUT_TOP5 else ""
    metrics = "".join(f"{name} {metric_text(value)}  " for name, value in record.get("metrics", {}).items())
    return (
        f"evaluation: top-1 {100 * record['top1']:.2f}%  {top5}"
        f"loss {record['loss']:.3f}  {metrics}({count(record['count'], 'image')} in {record['seconds']:.1f} s)"
    )


Reporter = Lines | Bar


def make_reporter(*, terminal_columns: int | None, is_notebook: bool, first_step: int, num_steps: int) -> Reporter:
    """Return a progress bar for a notebook or a terminal, plain lines otherwise."""
    if is_notebook:
        from IPython.display import display

        return Lines(num_steps=num_steps, first_step=first_step, display=display)
    if terminal_columns is None:
        return Lines(num_steps=num_steps)
    console = _Terminal(force_terminal=True, width=terminal_columns)
    return Bar(console, first_step=first_step, num_steps=num_steps)
