"""Warn if the time between a job's request to stop and its limit is too short to save a checkpoint."""

import math
from pathlib import Path
from typing import Any

from torch import nn

from bigbatch.trainer.input.stream import BATCHES_BETWEEN_EXCHANGES
from bigbatch.trainer.observe.observer import Observed, Observer


class Notice(Observer):
    """Tracks how long a stop may have to wait for each kind of work, and warns once if that is too long.

    A stop waits for the step under way, or for an evaluation's batches up to its next exchange, and then for two
    checkpoints, since one may be under way. seconds: time between the request and the job's limit.
    """

    def __init__(self, observed: Observed, *, seconds: int) -> None:
        self._observed, self._notice_seconds = observed, seconds
        self._longest = {"step": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self._has_said = False

    def at_report(self, record: dict[str, Any]) -> None:
        plan, done = self._observed.plan, record["step"]
        if done - plan.first_step > plan.log_every_steps:  # the first steps compile and warm up
            self._see("step", plan.global_batch_size / record["images_per_second"], done=done)

    def at_evaluation(self, record: dict[str, Any], model: nn.Module) -> None:
        at_once = self._observed.config.batch.microbatch_size * self._observed.communicator.world_size
        to_exchange = BATCHES_BETWEEN_EXCHANGES / math.ceil(record["count"] / at_once)
        self._see("evaluation", record["seconds"] * min(1.0, to_exchange), done=record["step"])

    def at_checkpoint(self, path: Path, *, step: int, seconds: float) -> None:
        self._see("checkpoint", seconds, done=step)

    def _see(self, kind: str, seconds: float, *, done: int) -> None:
        if text := self.see(kind, seconds):
            self._observed.hint(text, step=done)

    def see(self, kind: str, seconds: float) -> str | None:
        """Record the seconds of a step, part of an evaluation, or checkpoint; return a warning or None."""
        self._longest[kind] = max(self._longest[kind], seconds)
        before = max(("step", "evaluation"), key=lambda each: self._longest[each])
        saving = 2 * self._longest["checkpoint"]
        needed = self._longest[before] + saving
        if self._has_said or needed <= self._notice_seconds:
            return None
        self._has_said = True
        what = {"step": "a step", "evaluation": "an evaluation's next exchange"}[before]
        return (
            f"the checkpoint at the time limit may be lost: stopping takes up to {needed:.0f} s here "
            f"({self._longest[before]:.0f} s until {what} is done, {saving:.0f} s to save), and "
            f"the job asks {self._notice_seconds} s before; submit it again with --stop-seconds "
            f"{60 * math.ceil(needed / 30)}"
        )
