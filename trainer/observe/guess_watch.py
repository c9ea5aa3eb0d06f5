"""End a run that does not learn: its loss stays that of a guess."""

import math
from collections import deque
from typing import Any

from bigbatch.errors import TrainingDiverged
from bigbatch.trainer.observe.observer import Observed, Observer
from bigbatch.trainer.step.divergence import REMEDY

MARGIN = 0.01
"""Share of a guess's loss by which a model that learned nothing of the images can still be below it: one that knows
how frequent the classes are is by KL(frequencies || uniform), 0.02% for ImageNet and 1% where their sizes spread by a
third (0.37 of the mean, for 1000 classes); the rest is for noise."""


class GuessWatch(Observer):
    """Ends a run whose mean training loss over some number of steps after the warm-up is no better than a guess.

    The mean over their later half must be no better, too: with a small batch the loss may start above a guess, and
    fall. A guess has a cross-entropy of ln(num_classes), also with smoothed and mixed labels. Checkpoints do not keep
    the losses seen: a resumed run, perhaps with a lower learning rate, gets as many steps again.
    """

    def __init__(self, observed: Observed) -> None:
        config, plan = observed.config, observed.plan
        assert config.run.divergence_steps is not None
        self._steps = config.run.divergence_steps
        self._guess = math.log(config.data.num_classes)
        self._warmup_steps = round(config.schedule.warmup_epochs * plan.steps_per_epoch)
        self._last_step = plan.first_step
        self._windows: deque[tuple[int, float]] = deque()  # steps of a report, and their mean loss

    def at_report(self, record: dict[str, Any]) -> None:
        """Add a report, and check the mean. Raises: TrainingDiverged, on all ranks alike."""
        start, self._last_step = self._last_step, record["step"]
        if start < self._warmup_steps:
            return
        self._windows.append((record["step"] - start, record["loss"]))
        # reports differ in length: the oldest goes only if enough steps remain without it
        while sum(steps for steps, _ in self._windows) - self._windows[0][0] >= self._steps:
            self._windows.popleft()
        num_steps, mean = self._newest(self._steps)
        _, later = self._newest(self._steps / 2)
        if num_steps >= self._steps and min(mean, later) >= (1 - MARGIN) * self._guess:
            raise TrainingDiverged(
                f"the training loss was {mean:.3f} in the mean of steps {record['step'] - num_steps + 1} to "
                f"{record['step']}, and that of a guess is {self._guess:.3f}: {REMEDY}, or set run.divergence_steps to "
                "null to continue"
            )

    def _newest(self, at_least: float) -> tuple[int, float]:
        """Return number of steps and mean loss of the newest reports that cover at_least steps, or of all reports."""
        num_steps, total = 0, 0.0
        for steps, loss in reversed(self._windows):
            if num_steps >= at_least:
                break
            num_steps, total = num_steps + steps, total + steps * loss
        return num_steps, total / num_steps
