"""Checks and counts of run.reproducible: numbers that are out of its grid's range, or that it rounds to 0."""

from collections.abc import Mapping
from typing import Any

import torch

from bigbatch.errors import NotFinite, TrainingDiverged
from bigbatch.trainer.observe.observer import Observed, Observer
from bigbatch.trainer.step.divergence import REMEDY
from bigbatch.trainer.step.reproducible import GridStatistics
from bigbatch.words import name_ranks


class ExactSums(Observer):
    """Ends a run whose numbers do not fit the grid; adds the share of gradients that it rounds to 0 to reports."""

    def __init__(self, observed: Observed) -> None:
        self._plan, self._parts, self._communicator = observed.plan, observed.parts, observed.communicator
        assert isinstance(observed.parts.statistics, GridStatistics), "only of a run with run.reproducible"
        self._statistics = observed.parts.statistics
        self._totals_2 = torch.zeros(2, dtype=torch.float64)
        """Gradients of microbatches rounded to 0 in the counted steps of all ranks, and all that are not 0."""
        self._own_counts: dict[int, list[torch.Tensor]] = {}
        """Step -> this rank's counts of numbers out of range, by buffer, since the last report."""
        self._num_beyond = 0

    def before_step(self, step: int) -> None:
        """Count in the last step before a report: it takes two more passes over each gradient."""
        # not with a CUDA graph: replays repeat what was captured, so they would count in every step or never
        is_counted = self._plan.is_report(step + 1) and not self._parts.is_captured
        sums = self._parts.reducer.grid_sums
        sums.counts_underflow = is_counted
        if not self._parts.is_captured:
            self._own_counts[step] = sums.own_counts = []

    def before_report(self, done: int) -> None:
        """Raises: NotFinite if numbers of some ranks alone are out of range, on all ranks alike."""
        sums, own_counts, self._own_counts = self._parts.reducer.grid_sums, self._own_counts, {}
        self._num_beyond = 0 if self._parts.precision.skips_overflow else sums.take_beyond()
        if self._num_beyond and own_counts:
            places = ((step, index) for step, counts in own_counts.items() for index, each in enumerate(counts) if each)
            first_P = self._communicator.gather(next(places, None))
            step, index = min(each for each in first_P if each)
            ranks = [rank for rank, each in enumerate(first_P) if each and each[0] == step]
            if len(ranks) < len(first_P):
                buffer = self._parts.reducer.plan.buffers[index]
                where = f", first in step {step + 1} on {name_ranks(ranks)} of {len(first_P)} alone ({buffer})"
                require_on_grid(self._num_beyond, done=done, largest=sums.largest, where=where)

    def figures(self, done: int) -> Mapping[str, Any]:
        """Return the share since the last report. Raises: TrainingDiverged, on all ranks alike."""
        sums = self._parts.reducer.grid_sums
        require_on_grid(self._num_beyond, done=done, largest=sums.largest)
        if num_beyond := self._statistics.take_beyond():
            raise TrainingDiverged(
                f"{num_beyond} means or variances of microbatches were too large, or of a batch norm that a microbatch "
                f"skipped, by step {done}: run.reproducible cannot sum these; normalise the images, let each forward "
                "go through each batch norm once, or set it to false"
            )
        counts_2 = torch.tensor(sums.take_underflow(), dtype=torch.float64, device=self._communicator.device)
        counts_2 = self._communicator.sum_(counts_2, label=f"counts of the exact sums of step {done}").cpu()
        self._totals_2 += counts_2
        return _share(counts_2)

    def summary(self) -> Mapping[str, Any]:
        return _share(self._totals_2)


def _share(counts_2: torch.Tensor) -> dict[str, float | None]:
    num_lost, num_nonzero = counts_2.tolist()
    return {"grid_underflow_fraction": num_lost / num_nonzero if num_nonzero else None}


def require_on_grid(num_beyond: int, *, done: int, largest: float, where: str = "") -> None:
    """Raise NotFinite if microbatch gradients exceeded the range of run.reproducible, up to step done."""
    if num_beyond:
        raise NotFinite(
            f"{num_beyond} numbers of microbatches' gradients were larger than {largest:g}, or not finite, by step "
            f"{done}{where}: run.reproducible cannot sum such numbers; {REMEDY}"
        )
