"""Detect a run that has stopped learning: its loss is not finite, or stays that of a guess."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from bigbatch.errors import TrainingDiverged
from bigbatch.words import name_ranks

MARGIN = 0.01
"""Share of a guess's loss by which a model that learned nothing of the images can still be below it: one that knows
how frequent the classes are is by KL(frequencies || uniform), 0.02% for ImageNet and 1% where their sizes spread by a
third (0.37 of the mean, for 1000 classes); the rest is for noise."""
REMEDY = "lower schedule.base_lr or lengthen schedule.warmup_epochs"


def require_finite(loss: float, *, first_step: int, finite_steps: int, gather: Callable[[int], list[int]]) -> None:
    """Raise TrainingDiverged if the loss, summed over ranks and since first_step, is not finite.

    finite_steps: number of steps after first_step for which this rank's own sum was finite.
    Collective if it raises.
    """
    if math.isfinite(loss):
        return
    # the sum over ranks does not tell where it began: the rank with the fewest finite steps does
    counts = gather(finite_steps)
    ranks = [rank for rank, count in enumerate(counts) if count == min(counts)]
    step = first_step + min(counts) + 1
    if len(ranks) == len(counts):
        raise TrainingDiverged(f"the loss is {loss} since step {step}: {REMEDY}")
    raise TrainingDiverged(
        f"the loss is {loss} since step {step}, which began on {name_ranks(ranks)} of {len(counts)} alone: look at the "
        f"images and the GPU there, or {REMEDY}"
    )


class GuessWatch:
    """Ends a run whose mean training loss over some number of steps after the warm-up is no better than a guess.

    The mean over their later half must be no better, too: with a small batch the loss may start above a guess, and
    fall. A guess has a cross-entropy of ln(num_classes), also with smoothed and mixed labels. Checkpoints do not keep
    the losses seen: a resumed run, perhaps with a lower learning rate, gets as many steps again.
    """

    def __init__(self, *, steps: int, num_classes: int, warmup_steps: int, first_step: int) -> None:
        self._steps = steps
        self._guess = math.log(num_classes)
        self._warmup_steps = warmup_steps
        self._last_step = first_step
        self._windows: deque[tuple[int, float]] = deque()  # steps of a report, and their mean loss

    def see(self, record: Mapping[str, Any]) -> None:
        """Add a report of the training loop, and check the mean. Raises: TrainingDiverged, on all ranks alike."""
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
