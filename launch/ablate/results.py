"""What the runs of an ablation came to. Pure."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bigbatch.launch.tables import Table
from bigbatch.launch.words import percent

GAINS = ("times as fast as the one before", "as the first")
"""What the two columns of gains() are called."""


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
    head += (*GAINS, "an evaluation, median s")
    head += ("top-1, mean", "standard deviation, points")
    if target is not None:
        head += (f"to {percent(target)}, median s",)
    gained = gains([statistics.median(run.seconds for run in step.runs) for step in steps if step.runs])
    rows = []
    for step in steps:
        if step.runs:
            rows.append(_row(step, gained=next(gained), target=target))
        else:
            rows.append((step.name, f"0: {reasons(step.undone)}", *("",) * (len(head) - 2)))
    return Table(title, head, tuple(rows))


def gains(costs: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """Tell of each how many times as fast it is as the one before, and as the first, by what each takes."""
    for before, cost in zip((*costs[:1], *costs[:-1]), costs, strict=True):
        yield tuple(f"{other / cost:.2f}" for other in (before, costs[0]))


def reasons(undone: Sequence[str]) -> str:
    """Tell each reason once."""
    return "; ".join(dict.fromkeys(undone))


def _row(step: StepResult, *, gained: tuple[str, ...], target: float | None) -> tuple[str, ...]:
    seconds, top1 = [run.seconds for run in step.runs], [run.top1 for run in step.runs]
    evaluations = [run.evaluation_seconds for run in step.runs if run.evaluation_seconds is not None]
    resumed = sum(run.resumed > 0 for run in step.runs)
    undone = f", {len(step.undone)} not: {reasons(step.undone)}" if step.undone else ""
    row: tuple[str, ...] = (
        step.name,
        f"{len(step.runs)}{f', {resumed} resumed' if resumed else ''}{undone}",
        f"{step.runs[0].epochs:g}",
        f"{statistics.median(seconds):,.1f}",
        f"{min(seconds):,.1f} to {max(seconds):,.1f}",
        *gained,
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
