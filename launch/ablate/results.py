"""What the runs of an ablation came to. Pure."""

import math
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
    evaluation_seconds: float | None = None
    """Of the last evaluation; None where its record does not tell."""
    resumed: int = 0
    """How often it went on from a checkpoint: each start warms up anew, which its seconds have in them."""


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
    """Read the result out of a run's records. Raises: ValueError where they have no evaluation, or no training.

    KeyError, TypeError, OverflowError or ZeroDivisionError where they are none of a run's.
    """
    seconds, step, starts, last, reached = 0.0, 0, 0, None, None
    for record in records:
        if record["kind"] == "start":
            starts += 1
        elif record["kind"] == "train":
            seconds += (record["step"] - step) * global_batch_size / record["images_per_second"]
            step = record["step"]
        elif record["kind"] == "eval":
            last = record
            if target is not None and reached is None and record["top1"] >= target:
                reached = seconds
    if last is None:
        raise ValueError("it has no evaluation")
    epochs, top1, evaluation = float(last["epoch"]), float(last["top1"]), last.get("seconds")
    if not (0 < seconds < math.inf and 0 < epochs < math.inf and 0 <= top1 <= 1):
        raise ValueError(f"{seconds:g} s of training, {epochs:g} epochs, top-1 {top1:g}")
    evaluation = None if evaluation is None else float(evaluation)
    return RunResult(seed, epochs, seconds, top1, reached, evaluation, resumed=max(0, starts - 1))


def make_table(title: str, steps: Sequence[StepResult], *, target: float | None) -> Table:
    """Make a table with a row for each step. A step's gain is in training seconds, over those before it."""
    head: tuple[str, ...] = ("step", "runs", "epochs", "training, median s", "lowest to highest s")
    head += ("times as fast as the one before", "as the first", "an evaluation, median s")
    head += ("top-1, mean", "standard deviation, points")
    if target is not None:
        head += (f"to {percent(target)}, median s",)
    medians = [statistics.median(run.seconds for run in step.runs) for step in steps if step.runs]
    rows, before = [], medians[:1]
    for step in steps:
        if not step.runs:
            rows.append((step.name, f"0: {'; '.join(dict.fromkeys(step.undone))}", *("",) * (len(head) - 2)))
            continue
        seconds = statistics.median(run.seconds for run in step.runs)
        gains = tuple(f"{other / seconds:.2f}" for other in (before[-1], before[0]))
        before.append(seconds)
        rows.append(_row(step, gains=gains, target=target))
    return Table(title, head, tuple(rows))


def _row(step: StepResult, *, gains: tuple[str, ...], target: float | None) -> tuple[str, ...]:
    seconds, top1 = [run.seconds for run in step.runs], [run.top1 for run in step.runs]
    evaluations = [run.evaluation_seconds for run in step.runs if run.evaluation_seconds is not None]
    resumed = sum(run.resumed > 0 for run in step.runs)
    undone = f", {len(step.undone)} not: {'; '.join(dict.fromkeys(step.undone))}" if step.undone else ""
    row: tuple[str, ...] = (
        step.name,
        f"{len(step.runs)}{f', {resumed} resumed' if resumed else ''}{undone}",
        f"{step.runs[0].epochs:g}",
        f"{statistics.median(seconds):,.1f}",
        f"{min(seconds):,.1f} to {max(seconds):,.1f}",
        *gains,
        f"{statistics.median(evaluations):,.1f}" if evaluations else "not told",
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
