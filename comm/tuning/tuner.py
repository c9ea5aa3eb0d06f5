"""Choose the algorithm by size and the fusion plan from what this cluster and this model measure."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from bigbatch.comm.algorithms.hybrid import HybridTable, Measured, Times, make_hybrid
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.comm.tuning.climb import SUMS_PER_SIZE, climb
from bigbatch.comm.tuning.cost_model import SecondsOf, interpolate
from bigbatch.comm.tuning.measure import Effort, MeasuredLinks, Sums, slowest, time_sums
from bigbatch.comm.tuning.plan_search import (
    Backward,
    PlanChoice,
    evaluate_plan,
    exposed_seconds,
    least_exposed_seconds,
    least_gain_seconds,
    search_plan,
)
from bigbatch.errors import CommError

SMALLEST_BYTES = 1024
FACTOR = 4
REPETITIONS = 100
MOST_REPETITIONS = 400
CONTENDER_RATIO = 1.5
"""Where time is short, who is slower than the best by more than this is timed once."""
LAG_RATIO = 1.05
"""Who is surely behind the best by more than this while bytes count, and falls back further, is given up."""
NOISY_RISE = 1.15
"""Up to this, a larger sum's dearer bytes are put down to noise: the longest sums may be timed twice only."""
SWEEP_SHARE = 0.6
"""Of the time goes to the sweep over all sizes; the rest to where the choice is uncertain."""
MOST_NOISE = 0.02
"""Two contenders at a size are told apart where their medians are known this well; two such errors stay below 4%."""
NARROW = 1.5
"""Between two sizes that choose differently and lie further apart than by this factor, one more is measured."""
LEAST_REFINEMENT = 5
"""Repetitions below which a second look is not worth its check."""
BANDWIDTH_BOUND = 2.5
"""Four times the bytes took so many times as long: from here on bytes count, and who is behind stays behind."""
LARGEST_BYTES = 256 << 20
WORDS_PER_SIZE = 8
"""How often ranks gather times and texts from one look at the clock to the end, with one size measured in between."""


def tune_sizes(gradient_bytes: int) -> tuple[int, ...]:
    """Choose sizes to measure: 1 KiB, four times that and so on, last one that holds all gradients; at most 256 MiB."""
    largest = min(max(1, math.ceil(gradient_bytes / SMALLEST_BYTES)) * SMALLEST_BYTES, LARGEST_BYTES)
    sizes = [SMALLEST_BYTES]
    while FACTOR * sizes[-1] <= largest / 2:
        sizes.append(FACTOR * sizes[-1])
    return tuple(dict.fromkeys((*sizes, largest)))


def measure_times(
    communicator: Communicator,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype,
    seconds: float,
    on_size: Callable[[int, Mapping[str, Measured]], None],
    largest_first: bool = False,
) -> Times:
    """Time every algorithm at every size, from the smallest on, as far as seconds allow. Collective.

    largest_first: from the largest on that single sums show to fit into the time, so that what time does not suffice
    for are the sizes that matter least to gradients.

    seconds must be the same on all ranks. First all sizes, from the smallest on, as far as time allows: where it is
    short, algorithms far from the best are timed only once, and those that fall back while bytes count are given up.
    Then sizes between two that choose differently, and again those whose times leave the choice open. Calls on_size
    on all ranks.
    Raises: CommError where a sum came out wrong; PeerLostError.
    """
    start = time.perf_counter()
    all_contestants = {name: communicator.with_algorithm(name) for name in communicator.algorithms}
    # one for all sizes: each measures its beginning
    tensor_N = communicator.allocate(sizes[-1] // dtype.itemsize, dtype)
    times: dict[int, dict[str, Measured]] = {}

    def measure(size: int, names: Iterable[str], effort: Effort) -> None:
        contestants = {name: all_contestants[name] for name in names}
        part_N = tensor_N[: size // dtype.itemsize]
        sums = time_sums(part_N, contestants, effort=effort, label=f"tuning at {size} bytes")
        _require_right(sums, size)
        before = times.setdefault(size, {})
        for name, each in sums.items():
            earlier = before[name].seconds if name in before else ()
            before[name] = Measured((*earlier, *each.measured.seconds))
        on_size(size, before)

    before_words = elapsed_seconds(communicator, start)
    # thousands of ranks take longer to gather their times than to make a short sum
    word = elapsed_seconds(communicator, start) - before_words
    words = WORDS_PER_SIZE * word
    names = list(all_contestants)
    if largest_first:
        left = seconds - elapsed_seconds(communicator, start) - word
        reached, needed = climb(tensor_N, all_contestants, sizes[::-1], seconds=left, word=word, words=words)
        # a smaller sum takes no longer; where not even the smallest fits it is measured all the same
        for number, size in enumerate(reached or sizes[:1]):
            left = seconds - elapsed_seconds(communicator, start) - word  # which the break costs
            if times and needed > left:
                break
            share = SWEEP_SHARE * left / (len(reached) - number) if reached else 0.0
            measure(size, names, Effort(REPETITIONS, max(0.0, share - words), CONTENDER_RATIO))
            needed = SUMS_PER_SIZE * sum(each.median for each in times[size].values()) + words
        sizes = ()
    for number, size in enumerate(sizes):
        left = SWEEP_SHARE * seconds - elapsed_seconds(communicator, start) - words
        if times and _least_seconds_of(size, times, names) > left:
            break
        names = survivors(times, names)
        # an equal share of what is left, so that what a short sum does not need goes to the longer ones
        measure(size, names, Effort(REPETITIONS, max(0.0, left / (len(sizes) - number) - words), CONTENDER_RATIO))
    while (open_choice := next_open(times, granularity=dtype.itemsize)) is not None:
        size, names = open_choice
        left = seconds - elapsed_seconds(communicator, start) - words
        each = sum(expected_seconds(times, size, name) for name in names)
        # + 2: the check of the sum, and the pilot, come first
        if (LEAST_REFINEMENT + 2) * each > left:
            break
        # a quarter, so that several open choices get their turn
        measure(size, names, Effort(REPETITIONS, left / 4))
    communicator.release(tensor_N)
    return times


def next_open(times: Times, *, granularity: int) -> tuple[int, list[str]] | None:
    """Choose a size to look at (again), and who contends there; None where the choice is clear everywhere.

    First between two sizes that choose differently and are far apart; then the size with the least certain choice.
    """
    table, sizes = make_hybrid(times), sorted(times)
    for a, b in pairwise(sizes):
        # the geometric middle, in whole elements
        middle = math.isqrt(a * b) // granularity * granularity
        if table.choose(a) != table.choose(b) and b > NARROW * a and middle not in times:
            both = [name for name in times[a] if name in times[b]]
            return middle, [name for name in both if name in (table.choose(a), table.choose(b))] or both
    doubtful = {size: doubt for size in sizes if (doubt := _doubt(times[size])) and doubt[0] > MOST_NOISE}
    if not doubtful:
        return None
    size = max(doubtful, key=lambda size: doubtful[size][0])
    return size, doubtful[size][1]


def _doubt(at_size: Mapping[str, Measured]) -> tuple[float, list[str]] | None:
    """Say how uncertain the choice is, and between whom; None where it is clear, or was looked at often enough."""
    best = min(at_size, key=lambda name: at_size[name].median)
    open_ones = {
        name: noise
        for name, measured in at_size.items()
        if name != best
        and (noise := math.hypot(measured.noise, at_size[best].noise)) >= measured.median / at_size[best].median - 1
        and len(measured.seconds) < MOST_REPETITIONS
    }
    return (max(open_ones.values()), [best, *open_ones]) if open_ones else None


def expected_seconds(times: Times, size: int, name: str) -> float:
    """Estimate the seconds of an algorithm at a size that may not have been measured: that of the next larger one."""
    return next(times[other][name].median for other in sorted(times) if other >= size and name in times[other])


def _require_right(sums: Mapping[str, Sums], size: int) -> None:
    for name, each in sums.items():
        if each.num_wrong:
            raise CommError(
                f"{name} summed {each.num_wrong} elements of {size} bytes wrongly: run bigbatch comm bench, and do not "
                "train with it on this cluster"
            )


def elapsed_seconds(communicator: Communicator, start: float) -> float:
    """Return seconds since start (of time.perf_counter), the same on all ranks: they decide alike. Collective."""
    return slowest({"": [time.perf_counter() - start]}, communicator)[""][0]


def survivors(times: Times, names: Iterable[str]) -> list[str]:
    """Keep the algorithms that may still be the best at a larger size.

    Given up is who was, beyond noise, LAG_RATIO times slower than the best at the last two sizes, and did not catch
    up, while the best's time grew with the bytes. Who is slow for its latency catches up, and stays.
    """
    if len(times) < 2:
        return list(names)
    before, last = (times[size] for size in sorted(times)[-2:])
    best_before, best_last = (min(at_size.values(), key=lambda m: m.median) for at_size in (before, last))
    if best_last.median < BANDWIDTH_BOUND * best_before.median:
        return list(names)

    def is_behind(name: str) -> bool:
        was, now = before[name].median / best_before.median, last[name].median / best_last.median
        noise = math.hypot(last[name].noise, best_last.noise)
        # now >= was: who catches up may overtake at a larger size
        return min(was, now - noise) >= LAG_RATIO and now >= was

    return [name for name in names if not is_behind(name)]


def _least_seconds_of(size: int, times: Times, names: Iterable[str]) -> float:
    """Estimate a check and two repetitions of each algorithm at the next size, if time grows as the bytes do."""
    last = max(times)
    return 3 * size / last * sum(times[last][name].median for name in survivors(times, names))


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

    @property
    def keeps_stated(self) -> bool:
        """Tell whether the search found no gain over what the config states."""
        return self.stated.exposed_seconds - self.searched.exposed_seconds <= self.noise_seconds

    @property
    def chosen(self) -> PlanChoice:
        """Return the plan to train with, with the table."""
        return self.stated if self.keeps_stated else self.searched

    @property
    def table(self) -> HybridTable:
        """Return the algorithms to train with."""
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
