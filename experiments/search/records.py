"""Records of trials, and which one is the best."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Metric = Literal["top1", "loss"]
State = Literal["finished", "pruned", "failed"]


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended. result: of its last evaluation; reason: why it has none, or why it was stopped."""

    state: State
    result: float | None
    reason: str
    seconds: float
    """Seconds of the process that finished the trial; an interrupted trial had earlier ones."""


@dataclass(frozen=True)
class TrialRecord:
    """A trial that ended."""

    number: int
    round: int
    values: dict[str, str]
    ended: TrialEnd


def best_record(records: Sequence[TrialRecord], *, metric: Metric) -> TrialRecord | None:
    """Find the first finished one with the highest top-1 or the lowest loss; None where none finished."""
    finished = [record for record in records if record.ended.state == "finished"]
    sign = -1 if metric == "top1" else 1
    return min(finished, key=lambda record: (sign * result_of(record), record.number), default=None)


def ranked(records: Sequence[TrialRecord], *, metric: Metric) -> list[TrialRecord]:
    """List the finished trials from the best down, then the others in their order."""
    sign = -1 if metric == "top1" else 1
    finished = [record for record in records if record.ended.state == "finished"]
    others = [record for record in records if record.ended.state != "finished"]
    return [*sorted(finished, key=lambda record: (sign * result_of(record), record.number)), *others]


def result_of(record: TrialRecord) -> float:
    """Return the result of a trial that finished or was pruned."""
    assert record.ended.result is not None
    return record.ended.result


def show_values(values: dict[str, str]) -> str:
    """Show keys and values in one line."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def show_number(result: float, *, metric: Metric) -> str:
    """Show top-1 in percent, loss in nats; without the unit."""
    return f"{100 * result:.2f}" if metric == "top1" else f"{result:.4f}"


def show_result(result: float, *, metric: Metric) -> str:
    """Show a result with name and unit."""
    number = show_number(result, metric=metric)
    return f"top-1 {number}%" if metric == "top1" else f"loss {number} nats"
