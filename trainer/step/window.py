"""Measurements between two reports: on the device, then numbers of a rank, then of all ranks. No collectives."""

import math
import time
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from bigbatch.trainer.step.score import to_grid
from bigbatch.trainer.step.stragglers import straggler_share


class Window:
    """Keeps sums since the last report; they stay on the device until then, always in the same tensors."""

    def __init__(self, device: torch.device) -> None:
        self.sums_3 = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
        self.finite_steps = torch.zeros((), dtype=torch.int64, device=device)  # before the loss was not finite
        self.start_over()

    def start_over(self) -> None:
        """Reset all sums."""
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
        """Note whether the loss is finite, after all microbatches of a step were counted."""
        self.finite_steps += self.sums_3[0].isfinite()  # a sum that is not finite stays so


@dataclass(frozen=True, kw_only=True)
class WindowSums:
    """Holds a window in numbers: those of one rank, or, after their sum over ranks, those of all (P).

    waited_P and exposed_P are shares of each rank's own window; one rank's have its own at its place, and 0 elsewhere.
    The wait for images is that of the rank which waited longest: in lock-step the others wait for it, in their sums.
    The rank that comes last to the sums waits for the wire alone; what the others wait longer is for stragglers, as far
    as it is not for images.
    """

    loss: float
    """Not finite where that of any sample was not."""
    correct: float
    samples: float
    seconds: float
    exposed_seconds: float
    joules: float
    """NaN where a rank cannot tell."""
    num_failed: float
    """Ranks with a failed input."""
    num_skipped: float
    """Bad images."""
    num_lost: float
    """Gradients of microbatches that the grid of run.reproducible took for 0, in the steps that were counted."""
    num_nonzero: float
    """Gradients that were not 0, likewise; both are whole numbers with exact sums up to 2**53."""
    waited_P: tuple[float, ...]
    """Seconds that a rank waited for images, over those of its window."""
    exposed_P: tuple[float, ...]
    """Seconds that it waited for sums, likewise."""

    def pack(self, device: torch.device) -> Tensor:
        """Return all numbers in one flat fp64 tensor; unpack() reads its sum over ranks."""
        scalars = [getattr(self, name) for name in _SCALARS]
        shares = [share for name in _SHARES for share in getattr(self, name)]
        return torch.tensor([*scalars, *shares], dtype=torch.float64, device=device)

    @classmethod
    def unpack(cls, packed_N: Tensor) -> "WindowSums":
        """Return the numbers of pack(), or of a sum over ranks. Waits for the device."""
        numbers = packed_N.tolist()
        scalars, shares = numbers[: len(_SCALARS)], numbers[len(_SCALARS) :]
        num_ranks, rest = divmod(len(shares), len(_SHARES))
        assert rest == 0, f"{len(shares)} shares are not {len(_SHARES)} of each rank"
        named: dict[str, Any] = dict(zip(_SCALARS, scalars, strict=True))
        for place, name in enumerate(_SHARES):
            named[name] = tuple(shares[place * num_ranks : (place + 1) * num_ranks])
        return cls(**named)

    @property
    def mean_seconds(self) -> float:
        """Return the length of the window, as the mean over ranks."""
        return self.seconds / len(self.waited_P)

    @property
    def mean_exposed_seconds(self) -> float:
        """Return the seconds that a rank waited for sums, as the mean over ranks."""
        return self.exposed_seconds / len(self.exposed_P)

    @property
    def wait_fraction(self) -> float:
        """Return the share of the window in which training waited for images."""
        return max(self.waited_P)

    @property
    def straggler_fraction(self) -> float:
        """Return the share of the window lost to slower ranks."""
        return straggler_share(self.waited_P, self.exposed_P)

    @property
    def grid_underflow_fraction(self) -> float | None:
        """Return the share of non-zero gradients of microbatches that the grid took for 0; None if none was counted."""
        return self.num_lost / self.num_nonzero if self.num_nonzero else None

    def record(self, *, measures_waits: bool) -> dict[str, Any]:
        """Return figures for the log; without measures_waits, None for waits of ranks for each other."""
        waits = {
            "exposed_communication_fraction": self.mean_exposed_seconds / self.mean_seconds,
            "wire_wait_fraction": min(self.exposed_P),
            "straggler_fraction": self.straggler_fraction,
        }
        return {
            "images_per_second": self.samples / self.mean_seconds,
            "compute_images_per_second": self.samples / (self.mean_seconds * (1 - self.wait_fraction)),
            "input_wait_fraction": self.wait_fraction,
            **(waits if measures_waits else dict.fromkeys(waits)),
            "energy_joules": self.joules if math.isfinite(self.joules) else None,
        }


_SHARES = ("waited_P", "exposed_P")
"""Fields with one number per rank, in the order in which they are packed: after the others."""
_SCALARS = tuple(field.name for field in fields(WindowSums) if field.name not in _SHARES)
"""Fields with a single number, likewise."""
