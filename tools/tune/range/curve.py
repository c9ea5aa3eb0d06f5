"""Read the losses of a learning-rate range test (Smith 2017, arXiv 1506.01186): pure functions.

The loss falls where the learning rate begins to matter, and explodes where it is too large. Smith takes the ends of
that range by eye; the two readings here are those of common tools: the steepest descent, and a tenth of the rate that
explodes (fastai's lr_find: `steep`, and a tenth of the minimum's).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression

SMOOTHING = 0.8
"""Decay of the running mean of the loss, per step: the mean lags four steps behind."""
EXPLODED = 4.0
"""Multiple of the lowest smoothed loss at which the loss has exploded: fastai's lr_find stops there."""
WINDOW_SHARE = 0.05
"""Share of the steps to each side of a point over which its slope is taken; at least two steps."""
MIN_STEPS = 20
"""Least number of steps: fewer leave no room for windows."""
MAX_STEPS = 10_000
"""Largest number of steps: the slopes take time in proportion to its square, seconds at this one."""


@dataclass(frozen=True)
class Suggestion:
    """Readings of a curve; None if it shows none. suggested_lr: the smaller of steepest_lr and tenth_lr."""

    steepest_lr: float | None
    exploded_lr: float | None
    suggested_lr: float | None

    @property
    def tenth_lr(self) -> float | None:
        """Return a tenth of the rate that explodes."""
        return None if self.exploded_lr is None else self.exploded_lr / 10


def exponential(low: float, high: float, *, steps: int) -> Callable[[int], float]:
    """Return a schedule that rises from low at step 0 to high at the last step, by the same factor each step."""
    return lambda step: low * (high / low) ** (step / (steps - 1))


class SmoothedLoss:
    """Computes the running mean of the loss, without a bias towards its initial value 0."""

    def __init__(self) -> None:
        self._sum, self._weight = 0.0, 0.0
        self.lowest = math.inf

    def add(self, loss: float) -> float:
        """Return the mean after another step."""
        self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * loss
        # the running mean of ones: the division removes the bias towards the initial 0
        self._weight = SMOOTHING * self._weight + 1 - SMOOTHING
        mean = self._sum / self._weight
        self.lowest = min(self.lowest, mean)
        return mean

    def has_exploded(self, mean: float) -> bool:
        """Return whether mean, a running mean, exceeds EXPLODED times the lowest one."""
        # not ">": a NaN has exploded, too
        return not mean <= EXPLODED * self.lowest


def smooth(losses: Sequence[float]) -> list[float]:
    """Compute the running means of all steps."""
    mean = SmoothedLoss()
    return [mean.add(loss) for loss in losses]


def suggest(lrs: Sequence[float], losses: Sequence[float], *, exploded_lr: float | None) -> Suggestion:
    """Return the readings of a curve; its steps end at the explosion, if there was one.

    The steepest descent is the steepest straight line through the raw losses around a step, over the logarithm of the
    rate, before the lowest smoothed loss. Raw losses, because a running mean lags behind.
    """
    slopes = _slopes([math.log(lr) for lr in lrs], losses)
    means = smooth(losses)
    until = means.index(min(means))
    falls = {step: slope for step, slope in slopes.items() if slope < 0 and step <= until}
    steepest = lrs[min(falls, key=lambda step: falls[step])] if falls else None
    found = Suggestion(steepest, exploded_lr, None)
    readings = [lr for lr in (steepest, found.tenth_lr) if lr is not None]
    return replace(found, suggested_lr=min(readings)) if falls else found


def _slopes(x_N: Sequence[float], y_N: Sequence[float]) -> dict[int, float]:
    """Compute the least-squares slope around each step that has a whole window."""
    half = max(2, round(WINDOW_SHARE * len(x_N)))
    slopes = {}
    for center in range(half, len(x_N) - half):
        x, y = x_N[center - half : center + half + 1], y_N[center - half : center + half + 1]
        slopes[center] = linear_regression(x, y).slope
    return slopes
