"""Sums of measurements: on the device, of a rank and of all ranks between two reports, and of a run. No collectives."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from bigbatch.trainer.step.score import to_grid

LARGE_SHARE = 0.05
"""Share of the step lost to stragglers, above which the slowest rank is named."""


class Window:
    """Keeps sums since the last report; they stay on the device until then, always in the same tensors."""

    def __init__(self, device: torch.device) -> None:
        self.sums_3 = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
        self.finite_steps = torch.zeros((), dtype=torch.int64, device=device)  # counted until the loss is not finite
        self.start_over()

    def start_over(self) -> None:
        self.sums_3.zero_()
        self.finite_steps.zero_()
        self.start = time.perf_counter()
        self.steps = 0

    def count(self, loss: Tensor, logits_BK: Tensor, labels_B: Tensor) -> None:
        """Add one microbatch, without a host sync. loss is summed over its samples."""
        # detached, or the sums would keep the graph of every microbatch
        self.sums_3[0] += to_grid(loss.detach())
        self.sums_3[1] += (logits_BK.detach().argmax(1) == labels_B).sum()
        self.sums_3[2] += labels_B.numel()

    def end_step(self) -> None:
        """Record whether the loss is finite, after all microbatches of a step."""
        self.finite_steps += self.sums_3[0].isfinite()  # a sum that is not finite stays so


@dataclass(frozen=True)
class WindowSums:
    """Holds the sums of one rank's window as numbers or, after a sum over ranks, those of all P ranks.

    waited_P and exposed_P are shares of each rank's own window; before the sum over ranks all but its own are 0.
    The run's wait for images is that of the rank that waited longest: in lock-step the other ranks wait for it, in
    their sums. The rank that reaches the sums last waits only for the wire; what the other ranks wait longer, and not
    for images, they wait for stragglers.
    """

    loss: float
    """Not finite if any sample's loss is not."""
    correct: float
    samples: float
    seconds: float
    exposed_seconds: float
    joules: float
    """NaN if a rank cannot measure it."""
    num_failed: float
    """Ranks whose input failed."""
    num_skipped: float
    """Bad images."""
    waited_P: tuple[float, ...]
    """Share of its window that each rank waited for images."""
    exposed_P: tuple[float, ...]
    """Share of its window that each rank waited for sums."""

    def pack(self, device: torch.device) -> Tensor:
        """Return all numbers in one flat fp64 tensor; unpack() reads its sum over ranks."""
        *scalars, waited_P, exposed_P = astuple(self)
        return torch.tensor([*scalars, *waited_P, *exposed_P], dtype=torch.float64, device=device)

    @classmethod
    def unpack(cls, packed_N: Tensor) -> "WindowSums":
        """Return the numbers of pack(), or of a sum over ranks. Waits for the device."""
        num_scalars = len(fields(cls)) - 2
        numbers = packed_N.tolist()
        scalars, shares = numbers[:num_scalars], numbers[num_scalars:]
        num_ranks = len(shares) // 2
        return cls(*scalars, *map(tuple, (shares[:num_ranks], shares[num_ranks:])))

    @property
    def mean_seconds(self) -> float:
        """Return the length of the window in seconds, as the mean over ranks."""
        return self.seconds / len(self.waited_P)

    @property
    def mean_exposed_seconds(self) -> float:
        """Return the seconds that a rank waited for sums, as the mean over ranks."""
        return self.exposed_seconds / len(self.exposed_P)

    @property
    def wait_fraction(self) -> float:
        """Return the share of the window in which training waited for images."""
        return max(self.waited_P)

    def record(self, *, measures_waits: bool) -> dict[str, Any]:
        """Return figures for the log; without measures_waits, the ranks' waits for each other are None."""
        waits = {
            "exposed_communication_fraction": self.mean_exposed_seconds / self.mean_seconds,
            "wire_wait_fraction": min(self.exposed_P),
            "straggler_fraction": straggler_share(self.waited_P, self.exposed_P),
        }
        return {
            "images_per_second": self.samples / self.mean_seconds,
            "compute_images_per_second": self.samples / (self.mean_seconds * (1 - self.wait_fraction)),
            "input_wait_fraction": self.wait_fraction,
            **(waits if measures_waits else dict.fromkeys(waits)),
            "energy_joules": self.joules if math.isfinite(self.joules) else None,
        }


@dataclass
class Totals:
    """Totals of a run: seconds are means over ranks, of steps only (no evaluation, no checkpoint)."""

    steps: int = 0
    step_seconds: float = 0.0
    input_wait_seconds: float = 0.0
    """Sum over reports of the longest input wait of any rank."""
    measures_waits: bool = True
    """Whether the waits of ranks for each other, in the fields below, were measured."""
    exposed_seconds: float = 0.0
    first_report_seconds: float = 0.0
    """Part of step_seconds up to the first report, which includes the one-time costs of a run."""
    straggler_seconds: float = 0.0
    """Part of exposed_seconds that ranks waited for slower ones; like lag_seconds_P without the first report."""
    lag_seconds_P: list[float] = field(default_factory=list)
    """Lag of each rank: the longest wait of any rank, for sums and images, minus its own."""
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None

    def add(self, window: WindowSums, *, steps: int) -> None:
        """Add the sums over all ranks of a window of so many steps."""
        seconds = window.mean_seconds
        self.steps += steps
        self.step_seconds += seconds
        self.input_wait_seconds += window.wait_fraction * seconds
        self.exposed_seconds += window.mean_exposed_seconds
        # one-time costs differ between ranks, and are not straggling
        if not self.first_report_seconds:
            self.first_report_seconds, self.lag_seconds_P = seconds, [0.0] * len(window.waited_P)
            return
        self.straggler_seconds += straggler_share(window.waited_P, window.exposed_P) * seconds
        idle_P = [waited + exposed for waited, exposed in zip(window.waited_P, window.exposed_P, strict=True)]
        # in lock-step the rank that idles least is the one for which the others wait
        lags_P = [(max(idle_P) - each) * seconds for each in idle_P]
        self.lag_seconds_P = [a + b for a, b in zip(self.lag_seconds_P, lags_P, strict=True)]


def straggler_share(waited_P: Sequence[float], exposed_P: Sequence[float]) -> float:
    """Return the share of a step that is lost to slower ranks.

    waited_P, exposed_P: shares of the step that each rank waited for images, and for sums. A rank waits for the wire
    (as long as the rank that reaches the sums last), for images (its own or, in its sums, those of the rank that waits
    longest for images) and for stragglers.
    """
    # mean idling, less the wire's part, less the part that images cause
    mean = (sum(waited_P) + sum(exposed_P)) / len(waited_P)
    return max(0.0, mean - min(exposed_P) - max(waited_P))


def straggler_hint(share: float, lags_P: Sequence[float], *, host_of: Callable[[int], str]) -> str | None:
    """Return a line that names the slowest rank, or None if stragglers cost at most LARGE_SHARE.

    lags_P: as Totals.lag_seconds_P, in any unit; empty if they were not measured.
    """
    if share <= LARGE_SHARE or not lags_P:
        return None
    slowest = max(range(len(lags_P)), key=lambda rank: lags_P[rank])
    return (
        f"steps lose {100 * share:.0f}% of their time to slower ranks, most to rank {slowest} on {host_of(slowest)}: "
        "bigbatch launch preflight compares the nodes"
    )
