"""Checks and counts of run.reproducible: numbers that are out of its grid's range, or that it rounds to 0."""

from collections.abc import Mapping
from typing import Any

import torch

from bigbatch.errors import TrainingDiverged
from bigbatch.trainer.observe.observer import Observed, Observer
from bigbatch.trainer.step.divergence import REMEDY
from bigbatch.trainer.step.reproducible import GridStatistics


class ExactSums(Observer):
    """Ends a run whose numbers do not fit the grid; adds the share of gradients that it rounds to 0 to reports."""

    def __init__(self, observed: Observed) -> None:
        self._plan, self._parts, self._communicator = observed.plan, observed.parts, observed.communicator
        assert isinstance(observed.parts.statistics, GridStatistics), "only of a run with run.reproducible"
        self._statistics = observed.parts.statistics
        self._totals_2 = torch.zeros(2, dtype=torch.float64)
        """Gradients of microbatches rounded to 0 in the counted steps of all ranks, and all that are not 0."""

    def before_step(self, step: int) -> None:
        """Count in the last step before a report: it takes two more passes over each gradient."""
        # not with a CUDA graph: replays repeat what was captured, so they would count in every step or never
        is_counted = self._plan.is_report(step + 1) and not self._parts.is_captured
        self._parts.reducer.grid_sums.counts_underflow = is_counted

    def figures(self, done: int) -> Mapping[str, Any]:
        """Return the share since the last report. Raises: TrainingDiverged, on all ranks alike."""
        parts, sums = self._parts, self._parts.reducer.grid_sums
        if not parts.precision.skips_overflow:
            require_on_grid(sums.take_beyond(), done=done, largest=sums.largest)
        require_statistics(self._statistics.take_beyond(), done=done)
        counts_2 = torch.tensor(sums.take_underflow(), dtype=torch.float64, device=self._communicator.device)
        counts_2 = self._communicator.sum_(counts_2, label=f"counts of the exact sums of step {done}").cpu()
        self._totals_2 += counts_2
        return _share(counts_2)

    def summary(self) -> Mapping[str, Any]:
        return _share(self._totals_2)


def _share(counts_2: torch.Tensor) -> dict[str, float | None]:
    num_lost, num_nonzero = counts_2.tolist()
    return {"grid_underflow_fraction": num_lost / num_nonzero if num_nonzero else None}


def require_on_grid(num_beyond: int, *, done: int, largest: float) -> None:
    """Raise TrainingDiverged if microbatch gradients exceeded the range of run.reproducible, up to step done."""
    if num_beyond:
        raise TrainingDiverged(
            f"{num_beyond} numbers of microbatches' gradients were larger than {largest:g}, or not finite, by step "
            f"{done}: run.reproducible cannot sum such numbers; {REMEDY}"
        )


def require_statistics(num_beyond: int, *, done: int) -> None:
    """Raise TrainingDiverged if run.reproducible could not sum batch norm's statistics, up to step done."""
    if num_beyond:
        raise TrainingDiverged(
            f"{num_beyond} means or variances of microbatches were too large, or of a batch norm that a microbatch "
            f"skipped, by step {done}: run.reproducible cannot sum these; normalise the images, let each forward "
            "go through each batch norm once, or set it to false"
        )
