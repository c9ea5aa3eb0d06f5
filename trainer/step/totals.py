"""Measurements of a whole run, from its first window to its last. No collectives."""

from dataclasses import dataclass, field
from typing import Any

from bigbatch.trainer.step.window import WindowSums


@dataclass
class Totals:
    """Sums up a run: seconds are means over ranks, steps alone (no evaluation, no checkpoint)."""

    steps: int = 0
    step_seconds: float = 0.0
    input_wait_seconds: float = 0.0
    """Sum over reports of the longest input wait of any rank."""
    measures_waits: bool = True
    """Whether the waits of ranks for each other, in the fields below, were measured."""
    exposed_seconds: float = 0.0
    first_report_seconds: float = 0.0
    """Part of step_seconds in the first report, which contains what happens once in a run."""
    straggler_seconds: float = 0.0
    """Part of the exposed seconds in which a rank waited for slower ones; without the first report, as the next."""
    lag_seconds_P: list[float] = field(default_factory=list)
    """Lag of each rank: the longest wait of any rank, for sums and images, minus its own."""
    num_lost: float = 0.0
    """Gradients of microbatches that the grid took for 0, as WindowSums counts them."""
    num_nonzero: float = 0.0
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None

    @property
    def grid_underflow_fraction(self) -> float | None:
        """Return the share for the run so far, as in WindowSums; None if none was counted."""
        return self.num_lost / self.num_nonzero if self.num_nonzero else None

    def add(self, window: WindowSums, *, steps: int) -> None:
        """Add the sums over all ranks of a window of so many steps."""
        seconds = window.mean_seconds
        self.steps += steps
        self.step_seconds += seconds
        self.input_wait_seconds += window.wait_fraction * seconds
        self.exposed_seconds += window.mean_exposed_seconds
        self.num_lost += window.num_lost
        self.num_nonzero += window.num_nonzero
        # what happens once in a run takes ranks differently long, and is no straggling
        if not self.first_report_seconds:
            self.first_report_seconds, self.lag_seconds_P = seconds, [0.0] * len(window.waited_P)
            return
        self.straggler_seconds += window.straggler_fraction * seconds
        idle_P = [waited + exposed for waited, exposed in zip(window.waited_P, window.exposed_P, strict=True)]
        # in lock-step the rank that idles least is the one for which the others wait
        lags_P = [(max(idle_P) - each) * seconds for each in idle_P]
        self.lag_seconds_P = [a + b for a, b in zip(self.lag_seconds_P, lags_P, strict=True)]
