"""Time, ranks' time and energy until a run reached an accuracy. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, and what the run had cost by then. Times between two starts of a run do not count."""

    step: int
    epoch: float
    top1: float
    hours: float
    rank_hours: float
    joules: float | None
    """None where a driver did not tell."""


@dataclass(frozen=True)
class ToAccuracy:
    """Of one run."""

    target: float
    reached: Evaluated | None
    best: Evaluated | None
    evaluations: tuple[Evaluated, ...]
    is_gpu: bool

    @property
    def shown(self) -> Evaluated | None:
        """Where the target was reached, else the best."""
        return self.reached or self.best


def to_accuracy(records: Sequence[dict[str, Any]], *, target: float | None) -> ToAccuracy:
    """Out of a run's records; without a target, to its best top-1."""
    evaluations = []
    hours = rank_hours = 0.0
    joules: float | None = 0.0
    before: float | None = None
    ranks, is_gpu = 1, False
    for record in records:
        if record["kind"] == "start":
            ranks = record["job"].get("world_size", 1)
            is_gpu = not str(record["job"].get("device", "cpu")).startswith("cpu")
        elif before is not None:
            passed = max(0.0, record["time"] - before) / 3600
            hours, rank_hours = hours + passed, rank_hours + ranks * passed
        before = record["time"]
        if record["kind"] == "train":
            own = record.get("energy_joules")
            joules = None if joules is None or own is None else joules + own
        if record["kind"] == "eval":
            evaluations.append(Evaluated(record["step"], record["epoch"], record["top1"], hours, rank_hours, joules))
    best = max(evaluations, key=lambda each: each.top1, default=None)
    goal = target if target is not None else best.top1 if best else 0.0
    reached = next((each for each in evaluations if each.top1 >= goal), None)
    return ToAccuracy(goal, reached, best, tuple(evaluations), is_gpu)
