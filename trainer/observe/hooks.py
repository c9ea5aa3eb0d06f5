"""Functions that `bigbatch.train` calls during a run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bigbatch.trainer.observe.observer import Observer


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """Functions that `bigbatch.train` calls on every rank, with equal arguments except an evaluation's seconds.

    Return values are ignored, exceptions end the run, and records must not be changed. A run that returns to a
    checkpoint because its ranks' weights differ calls them again for the steps after it.
    """

    on_step: Callable[[int], None] = lambda done: None
    """(steps done), after each step, without synchronizing: the device may still compute the weights."""
    on_report: Callable[[dict[str, Any]], None] = lambda record: None
    """(record of metrics.jsonl), after every run.log_every_steps."""
    on_evaluation: Callable[[dict[str, Any], nn.Module], None] = lambda record, model: None
    """(record of metrics.jsonl, model), in evaluation mode with the evaluated weights."""
    on_checkpoint: Callable[[Path], None] = lambda path: None
    """(folder of the checkpoint), at a later report, after rank 0 has written it."""
    on_end: Callable[[dict[str, Any]], None] = lambda summary: None
    """(contents of summary.json), at the end of a run that was not stopped."""


class HooksObserver(Observer):
    """Calls TrainingHooks."""

    def __init__(self, hooks: TrainingHooks) -> None:
        self._hooks = hooks

    def after_step(self, done: int) -> None:
        self._hooks.on_step(done)

    def at_report(self, record: dict[str, Any]) -> None:
        self._hooks.on_report(record)

    def at_evaluation(self, record: dict[str, Any], model: nn.Module) -> None:
        self._hooks.on_evaluation(record, model)

    def at_checkpoint(self, path: Path, *, step: int, seconds: float) -> None:
        self._hooks.on_checkpoint(path)
