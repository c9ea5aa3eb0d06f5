"""What a run measures of itself: each window between two reports, and all of them together. No collectives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bigbatch.trainer.step.stragglers import straggler_share


@dataclass(frozen=True, kw_only=True)
class WindowFigures:
    """A window, over all ranks (P). Seconds are means over ranks, shares of each rank's own window.

    The wait for pictures is that of the rank which waited longest: in lock-step the others wait for it, in their sums.
    The rank that comes last to the sums waits for the wire alone; what the others wait longer is for stragglers, as far
    as it is not for pictures.
    """

    steps: int
    samples: float
    seconds: float
    exposed_seconds: float
    joules: float
    """NaN where a rank cannot tell."""
    waited_P: Sequence[float]
    exposed_P: Sequence[float]

    @property
    def wait_fraction(self) -> float:
        """Share of the window in which training waited for pictures."""
        return max(self.waited_P)

    @property
    def straggler_fraction(self) -> float:
        """Share of the window lost to slower ranks."""
        return straggler_share(self.waited_P, self.exposed_P)

    def record(self, *, measures_waits: bool) -> dict[str, Any]:
        """Its figures for the log; None for those of ranks that waited for each other, without measures_waits."""
        waits = {
            "exposed_communication_fraction": self.exposed_seconds / self.seconds,
            "wire_wait_fraction": min(self.exposed_P),
            "straggler_fraction": self.straggler_fraction,
        }
        return {
            "images_per_second": self.samples / self.seconds,
            "compute_images_per_second": self.samples / (self.seconds * (1 - self.wait_fraction)),
            "input_wait_fraction": self.wait_fraction,
            **(waits if measures_waits else dict.fromkeys(waits)),
            "energy_joules": self.joules if math.isfinite(self.joules) else None,
        }


@dataclass
class Totals:
    """Of a run: seconds are means over ranks, steps alone (no evaluation, no checkpoint)."""

    steps: int = 0
    step_seconds: float = 0.0
    input_wait_seconds: float = 0.0
    """Of the rank that waited longest between two reports."""
    measures_waits: bool = True
    """What follows of ranks that waited for each other was measured."""
    exposed_seconds: float = 0.0
    first_report_seconds: float = 0.0
    """Of step_seconds, those of the first report: what happens once in a run happens there."""
    straggler_seconds: float = 0.0
    """Of the exposed ones, those in which a rank waited for slower ones; as the next, but for the first report."""
    lag_seconds_P: list[float] = field(default_factory=list)
    """How much longer than each rank the one waited, for sums and pictures, that waited longest."""
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    saved_step: int = 0
    """Of the newest checkpoint; where the run started, as long as there is none."""
    stopped_by: str | None = None

    def add(self, window: WindowFigures) -> None:
        """One more window."""
        self.steps += window.steps
        self.step_seconds += window.seconds
        self.input_wait_seconds += window.wait_fraction * window.seconds
        self.exposed_seconds += window.exposed_seconds
        if not self.first_report_seconds:
            self.first_report_seconds, self.lag_seconds_P = window.seconds, [0.0] * len(window.waited_P)
            return
        self.straggler_seconds += window.straggler_fraction * window.seconds
        idle_P = [waited + exposed for waited, exposed in zip(window.waited_P, window.exposed_P, strict=True)]
        lags_P = [(max(idle_P) - each) * window.seconds for each in idle_P]
        self.lag_seconds_P = [a + b for a, b in zip(self.lag_seconds_P, lags_P, strict=True)]
