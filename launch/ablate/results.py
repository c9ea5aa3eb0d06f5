"""What the runs of an ablation came to. Pure."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bigbatch.launch.tables import Table
from bigbatch.launch.words import percent


@dataclass(frozen=True)
class RunResult:
    """This is what one run came to. Seconds are of training steps: no start, no evaluation, no checkpoint."""

    seed: int
    epochs: float
    seconds: float
    top1: float
    """Of the last evaluation."""
    reached_seconds: float | None
    """Until the first evaluation that had the target; None where none had, or none was named."""


@dataclass(frozen=True)
class StepResult:
    """A step has runs that are done, and reasons why others are not."""

    name: str
    changes: dict[str, Any]
    runs: tuple[RunResult, ...]
    undone: tuple[str, ...]


def run_result(
    records: Iterable[dict[str, Any]], *, seed: int, global_batch_size: int, target: float | None
) -> RunResult:
    """Read the result out of a run's records. Raises: ValueError where they have no evaluation."""
    seconds, step, last, reached = 0.0, 0, None, None
    for record in records:
        if record["kind"] == "train":
            seconds += (record["step"] - step) * global_batch_size / record["images_per_second"]
            step = record["step"]
        elif record["kind"] == "eval":
            last = record
            if target is not None and reached is None and record["top1"] >= target:
                reached = seconds
    if last is None:
        raise ValueError("it has no evaluation")
    return RunResult(seed, last["epoch"], seconds, last["top1"], reached)


def make_table(title: str, steps: Sequence[StepResult], *, target: float | None) -> Table:
    """Make a table with a row for each step."""
    head: tuple[str, ...] = ("step", "runs", "epochs", "training, median s", "lowest to highest s")
    head += ("top-1, mean", "standard deviation, points")
    if target is not None:
        head += (f"to {percent(target)}, median s",)
    return Table(title, head, tuple(_row(step, target=target) for step in steps))


def _row(step: StepResult, *, target: float | None) -> tuple[str, ...]:
    if not step.runs:
        blanks = ("",) * (5 if target is None else 6)
        return (step.name, f"0: {'; '.join(dict.fromkeys(step.undone))}", *blanks)
    seconds, top1 = [run.seconds for run in step.runs], [run.top1 for run in step.runs]
    undone = f", {len(step.undone)} not: {'; '.join(dict.fromkeys(step.undone))}" if step.undone else ""
    row: tuple[str, ...] = (
        step.name,
        f"{len(step.runs)}{undone}",
        f"{step.runs[0].epochs:g}",
        f"{statistics.median(seconds):,.1f}",
        f"{min(seconds):,.1f} to {max(seconds):,.1f}",
        f"{100 * statistics.fmean(top1):.2f}%",
        f"{100 * statistics.stdev(top1):.2f}" if len(top1) > 1 else "one run",
    )
    return row if target is None else (*row, _to_target(step.runs))


def _to_target(runs: Sequence[RunResult]) -> str:
    """Return the median of those that reached it."""
    reached = [run.reached_seconds for run in runs if run.reached_seconds is not None]
    if not reached:
        return "not reached"
    rest = "" if len(reached) == len(runs) else f", {len(reached)} of {len(runs)} runs"
    return f"{statistics.median(reached):,.1f}{rest}"
