"""Figures of a job that interruptions cut into several runs: ranks are lost or join, or the job goes back."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from bigbatch.trainer.step.window import Totals

LOST, JOINED, OTHER = "rank_loss", "rank_join", "other"
"""Kinds of interruptions. Others: weights that differ or are not finite, and a step that cannot be captured."""


class JobFigures:
    """Adds up the figures of a job's runs, on each rank; times are by time.perf_counter()."""

    def __init__(self, announced: Mapping[str, Any] | None = None, *, waited_seconds: float = 0.0) -> None:
        """announced: by a rank of the job that this rank joins, waited_seconds after the others stopped for it."""
        now, told = time.perf_counter(), announced or {}
        self.first_step: int | None = told.get("first_step")
        """Step at which the first run of the job began; None before."""
        self._began = now - told.get("seconds", 0.0)
        self._former = Totals(**told.get("totals", {}))
        self.counts: dict[str, int] = dict(told.get("counts", {LOST: 0, JOINED: 0, OTHER: 0}))
        self.waits: dict[str, float] = dict(told.get("waits", dict.fromkeys(self.counts, 0.0)))
        """Seconds from the end of a run to the start of the next one, by kind."""
        self._kind, self._since = "", now - waited_seconds
        if announced:
            self.count(JOINED)

    def announce(self) -> dict[str, Any]:
        """Return what a rank that joins must know."""
        return {
            "first_step": self.first_step,
            "seconds": self.seconds,
            "totals": asdict(self._former),
            "counts": self.counts,
            "waits": self.waits,
        }

    @property
    def seconds(self) -> float:
        """Seconds since the first run began."""
        return time.perf_counter() - self._began

    def interrupt(self, totals: Totals) -> None:
        """Note that a run has ended, and its totals."""
        self._since, self._former = time.perf_counter(), replace(add_up(self._former, totals), last_evaluation={})

    def count(self, kind: str) -> None:
        """Count the interruption, now that its kind is known."""
        self._kind = kind
        self.counts[kind] += 1

    def start_run(self, step: int) -> dict[str, Any]:
        """Note that the next run starts; return the fields of its start record."""
        if self.first_step is None:
            self.first_step = step
        kind, self._kind = self._kind, ""
        if not kind:
            return {}
        waited = time.perf_counter() - self._since
        self.waits[kind] += waited
        return {"interruption": kind, "interruption_seconds": waited}

    def start_steps(self) -> None:
        """Note that a run makes its first step."""
        if not any(self.counts.values()):
            self._began = time.perf_counter()

    def total(self, totals: Totals) -> Totals:
        """Return the totals of all runs, of which the last has these."""
        return add_up(self._former, totals)

    def summary(self) -> dict[str, Any]:
        """Return the counts and seconds of losses and joins, if there were any."""
        found: dict[str, Any] = {}
        for kind in (LOST, JOINED):
            if self.counts[kind]:
                found |= {f"num_{kind}{'es' if kind == LOST else 's'}": self.counts[kind]}
                found |= {f"{kind}_seconds": self.waits[kind]}
        return found


def add_up(former: Totals, later: Totals) -> Totals:
    """Return the totals of two runs, of which the later one may have another number of ranks.

    If only one of them measured the waits of ranks, as after a CUDA graph, the other counts with the same share.
    """
    names = ("steps", "step_seconds", "input_wait_seconds", "exposed_seconds", "first_report_seconds")
    sums = {name: getattr(former, name) + getattr(later, name) for name in (*names, "straggler_seconds")}
    lags_P = later.lag_seconds_P
    if len(lags_P) == len(former.lag_seconds_P):
        lags_P = [a + b for a, b in zip(lags_P, former.lag_seconds_P, strict=True)]
    with_steps = [each for each in (former, later) if each.steps]
    measured = [each for each in with_steps if each.measures_waits]
    if len(measured) < len(with_steps):
        for only in measured:
            sums["exposed_seconds"] = only.exposed_seconds * sums["step_seconds"] / only.step_seconds
            later_seconds = only.step_seconds - only.first_report_seconds
            share = only.straggler_seconds / later_seconds if later_seconds else 0.0
            sums["straggler_seconds"] = share * (sums["step_seconds"] - sums["first_report_seconds"])
    measures_waits = bool(measured) if with_steps else later.measures_waits
    return replace(later, measures_waits=measures_waits, lag_seconds_P=lags_P, **sums)
