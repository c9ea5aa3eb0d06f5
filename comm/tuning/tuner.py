"""Choose the algorithm by size and the fusion plan from what this cluster and this model measure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, Times, make_hybrid
from bigbatch.comm.gradients.fusion import FusionPlan, PlanSizes, TensorSpec
from bigbatch.comm.tuning.cost_model import SecondsOf, interpolate
from bigbatch.comm.tuning.measure import MeasuredLinks
from bigbatch.comm.tuning.plan_search import (
    LEAST_GAIN,
    Backward,
    PlanChoice,
    best_plan,
    evaluate_plan,
    exposed_seconds,
    least_exposed_seconds,
    least_gain_seconds,
    plans_to_try,
    search_plan,
)
from bigbatch.comm.tuning.whole_steps import Candidate, MeasuredStep, choose_step

NOISY_RISE = 1.15
"""Up to this, a larger sum's dearer bytes are put down to noise: the longest sums may be timed twice only."""


@dataclass(frozen=True)
class TuningFindings:
    """Holds what was measured, what was chosen, and what else there was to choose. Seconds exposed are simulated."""

    links: MeasuredLinks
    times: Times
    backward: Backward
    tensors: tuple[TensorSpec, ...]
    """In the order in which they become ready."""
    fastest: HybridTable
    """By the medians."""
    searched: PlanChoice
    """The best plan with it."""
    stated: PlanChoice
    """What the config states, with its algorithm."""
    stated_table: HybridTable
    stated_with_fastest: PlanChoice
    least_exposed_seconds: float
    """Of the best of all cuts into runs of neighbours with the fastest table; or of the searched plan, which may pass
    over a large gradient and so be better still, or of the stated one.
    """
    noise_seconds: float
    """A difference below this between what stated and searched expose means nothing: by the noise of the medians, or
    as LEAST_GAIN says.
    """
    steps: tuple[MeasuredStep, ...] = ()
    """Whole steps: of what the config states, then of the best few simulated. Empty where there was no time."""

    @property
    def measured_choice(self) -> MeasuredStep | None:
        """Return the choice that whole steps make; None where none were measured."""
        return choose_step(self.steps, least_gain=LEAST_GAIN) if self.steps else None

    @property
    def keeps_stated(self) -> bool:
        """Tell whether there is no gain over what the config states: of whole steps, else of simulated ones."""
        if self.measured_choice:
            return self.measured_choice is self.steps[0]
        return self.stated.exposed_seconds - self.searched.exposed_seconds <= self.noise_seconds

    @property
    def chosen(self) -> PlanChoice:
        """Return the plan to train with, with the table."""
        if self.measured_choice:
            return self.measured_choice.candidate.choice
        return self.stated if self.keeps_stated else self.searched

    @property
    def table(self) -> HybridTable:
        """Return the algorithms to train with."""
        if self.measured_choice:
            return self.measured_choice.candidate.table
        return self.stated_table if self.keeps_stated else self.fastest


def choose(
    links: MeasuredLinks,
    times: Times,
    backward: Backward,
    tensors: Sequence[TensorSpec],
    *,
    stated: PlanSizes,
    stated_table: HybridTable,
) -> TuningFindings:
    """Choose the table of algorithms, then the plan that exposes least with it; or what is stated. Pure.

    Of a stated table whose algorithms were not measured, because they do not run here, the plan alone counts.
    """
    fastest = make_hybrid(times)
    with_stated = {size: at_size for size, at_size in times.items() if stated_table.choose(size) in at_size}
    if not with_stated:
        stated_table, with_stated = fastest, dict(times)
    by_fastest, as_stated = seconds_by(times, fastest.choose), seconds_by(with_stated, stated_table.choose)
    searched = search_plan(tensors, backward, by_fastest, stated=stated)
    found = evaluate_plan(stated, tensors, backward, as_stated)
    return TuningFindings(
        links=links,
        times=times,
        backward=backward,
        tensors=tuple(tensors),
        fastest=fastest,
        searched=searched,
        stated=found,
        stated_table=stated_table,
        stated_with_fastest=evaluate_plan(stated, tensors, backward, by_fastest),
        least_exposed_seconds=min(
            found.exposed_seconds,
            searched.exposed_seconds,
            least_exposed_seconds(tensors, backward, by_fastest),
        ),
        noise_seconds=max(
            math.hypot(
                _noise_of(found, backward, with_stated, stated_table), _noise_of(searched, backward, times, fastest)
            ),
            least_gain_seconds(backward, searched.exposed_seconds),
        ),
    )


def best_candidates(findings: TuningFindings, *, count: int) -> list[Candidate]:
    """List what the config states, then the count best others, simulated from the medians: whose steps are worth
    measuring. Pure.

    They are the fastest table, and each algorithm at any size, each with the plan that exposes least with it.
    """
    f = findings
    plans = plans_to_try(f.tensors, f.backward, stated=f.stated.sizes)
    found = [Candidate(f.fastest, f.searched)]
    for name in dict.fromkeys(name for at_size in f.times.values() for name in at_size):
        table = HybridTable((HybridRow(None, name),))
        seconds_of = seconds_by({size: at for size, at in f.times.items() if name in at}, table.choose)
        found.append(Candidate(table, best_plan(plans, f.backward, seconds_of)))
    stated = Candidate(f.stated_table, f.stated)
    others: dict[tuple[HybridTable, FusionPlan], Candidate] = {}
    for each in sorted(found, key=lambda each: each.choice.exposed_seconds):
        others.setdefault((each.table, each.choice.plan), each)
    others.pop((stated.table, stated.choice.plan), None)
    return [stated, *others.values()][: count + 1]


def _noise_of(choice: PlanChoice, backward: Backward, times: Times, table: HybridTable) -> float:
    """Estimate the uncertainty of what a plan exposes: half of what lies between all medians too low and too high."""
    low, high = (
        exposed_seconds(choice.plan, backward, seconds_by(times, table.choose, deviation=deviation))
        for deviation in (-1, 1)
    )
    return (high - low) / 2


def seconds_by(times: Times, choose: Callable[[int], str], *, deviation: int = 0) -> SecondsOf:
    """Estimate the seconds of an all-reduce of any size, when choose names the algorithm of each measured one.

    A byte that seems a little dearer in a larger sum counts as in the smaller one (NOISY_RISE): else, by noise alone,
    a plan would seem to gain from more buffers. deviation: as if each median were off by so many times its noise.
    """
    seconds: dict[int, float] = {}
    for size in sorted(times):
        measured = times[size][choose(size)]
        median = measured.median * max(0.0, 1 + deviation * measured.noise)
        smaller = max(seconds, default=size)
        as_cheap = seconds.get(smaller, median) * size / smaller
        seconds[size] = as_cheap if as_cheap < median <= NOISY_RISE * as_cheap else median
    return interpolate(seconds)
