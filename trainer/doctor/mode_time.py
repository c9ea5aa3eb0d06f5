"""The time that the trials of compute.mode=auto may take: it follows the length of the run."""

import math
from dataclasses import dataclass

from bigbatch.trainer.doctor.budget import EXTRA_SECONDS
from bigbatch.trainer.doctor.modes import Mode

MOST_SECONDS = 240.0
"""Most that all trials of a start take: enough to start the process, for eager trials, and to compile a ResNet-50."""
SHARE_OF_RUN = 0.1
"""Share that trials may take of the seconds of the run in the stated mode."""
LEAST_IMAGES = 50_000
"""Images per rank in the whole run below which nothing is tried.

Starting the process and timing the stated mode take 10 s at least: a tenth of a run of 100 s. ResNet-50 at 32 images,
eager on an H100 (823 images/s, docs/gpu.md), trains 50,000 images in 61 s, and smaller models are faster. A model slow
enough to gain from trials here trains for a few minutes in all.
"""
FIRST_SECONDS = 60.0
"""Most that the stated mode's trial takes, with the start of the process, if it compiles nothing."""
CUT_SHARE = 0.5
"""Share of the remaining time after which a trial that compiles nothing is cut: a hang leaves time for others."""


@dataclass(frozen=True)
class TrialTime:
    """Time for the trials of a start; equal on all ranks, since these facts are."""

    num_images: int
    """Images that a rank computes in the whole run."""
    wait_seconds: float = math.inf
    """Most that all trials take since ranks wait for each other."""

    @property
    def is_too_short(self) -> bool:
        """Return whether the run is too short for any trial."""
        return self.num_images < LEAST_IMAGES

    def allowed(self, images_per_second: float) -> tuple[float, str]:
        """Return the seconds for all trials, and what limits them.

        images_per_second: rate of the stated mode; 0 if it is unknown.
        """
        seconds = self.num_images / images_per_second if images_per_second else math.inf
        return min(
            (MOST_SECONDS, "the most for any run"),
            (SHARE_OF_RUN * seconds, f"{SHARE_OF_RUN:.0%} of this run's time"),
            (self.wait_seconds, "half of comm.timeout_seconds"),
        )

    def first_limit(self, mode: Mode) -> float:
        """Return the seconds for the stated mode, which is tried before its rate is known."""
        return min(MOST_SECONDS if mode.compile else FIRST_SECONDS, self.wait_seconds)


def seconds_needed(mode: Mode) -> float:
    """Return the seconds without which a trial is not begun: assumed for a ResNet, with no compiled code kept."""
    return EXTRA_SECONDS["compile" if mode.compile else "graph"]


def limit_of(mode: Mode, *, left: float) -> float:
    """Return the seconds after which a trial is cut. A compilation gets all that is left."""
    return left if mode.compile else max(CUT_SHARE * left, seconds_needed(mode))
