"""Time, ranks' time and energy until a run reached an accuracy. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bigbatch.trainer.run.cost import spent_by


@dataclass(frozen=True)
class Evaluated:
    """An evaluation and the run's cost until then. Times between two starts of a run do not count."""

    step: int
    epoch: float
    top1: float
    hours: float
    rank_hours: float
    joules: float | None
    """None if a driver did not measure it."""


@dataclass(frozen=True)
class ToAccuracy:
    """The evaluation in which one run reached a target, or its best one."""

    target: float
    reached: Evaluated | None
    best: Evaluated | None
    evaluations: tuple[Evaluated, ...]
    is_gpu: bool

    @property
    def shown(self) -> Evaluated | None:
        """Return the evaluation that reached the target, else the best one."""
        return self.reached or self.best


def to_accuracy(records: Iterable[dict[str, Any]], *, target: float | None) -> ToAccuracy:
    """Find in a run's records when it reached the target; without a target, its best top-1."""
    evaluations = []
    is_gpu = False
    for record, spent in spent_by(records):
        if record["kind"] == "start":
            is_gpu = not str(record["job"].get("device", "cpu")).startswith("cpu")
        if record["kind"] == "eval":
            found = (record["step"], record["epoch"], record["top1"])
            evaluations.append(Evaluated(*found, spent.hours, spent.rank_hours, spent.joules))
    best = max(evaluations, key=lambda each: each.top1, default=None)
    goal = target if target is not None else best.top1 if best else 0.0
    reached = next((each for each in evaluations if each.top1 >= goal), None)
    return ToAccuracy(goal, reached, best, tuple(evaluations), is_gpu)
