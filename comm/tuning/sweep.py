"""Time every algorithm by size within a given time: where the choice between them is open most of all."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from bigbatch.comm.algorithms.hybrid import Measured, Times, make_hybrid
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.tuning.climb import SUMS_PER_SIZE, climb
from bigbatch.comm.tuning.measure import Effort, Sums, slowest, time_sums
from bigbatch.errors import CommError

SMALLEST_BYTES = 1024
FACTOR = 4
REPETITIONS = 100
MOST_REPETITIONS = 400
CONTENDER_RATIO = 1.5
"""Where time is short, who is slower than the best by more than this is timed once."""
LAG_RATIO = 1.05
"""Who is surely behind the best by more than this while bytes count, and falls back further, is given up."""
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
WORDS_PER_SIZE = 5
"""How often ranks tell each other times and texts after a look at the clock: up to three times while a size is
measured, at the next look, and at the end."""
WORDS_TO_FIRST = 4
"""How often they do before: when groups connect, at a look, and after two probes."""


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
    worth_measuring: Callable[[int, Sequence[str]], Sequence[str]] = lambda size, names: names,
) -> Times:
    """Time every algorithm at every size, from the smallest on, as far as seconds allow. Collective.

    worth_measuring: keeps of the algorithms those that may be the fastest at a size.
    seconds must be the same on all ranks. First all sizes: where time is short, algorithms far from the best are timed
    only once, and those that fall back while bytes count are given up. Then sizes between two that choose differently,
    and again those whose times leave the choice open. Calls on_size on all ranks. The smallest is measured in any case.
    Raises: CommError where a sum came out wrong; PeerLostError.
    """
    sweep = _Sweep(communicator, start=time.perf_counter(), seconds=seconds, on_size=on_size)
    sweep.connect(sizes[-1], dtype)
    names = list(communicator.algorithms)
    for number, size in enumerate(sizes):
        left = sweep.left - (1 - SWEEP_SHARE) * seconds - sweep.words
        if sweep.times and _least_seconds_of(size, sweep.times, names) > left:
            break
        names = survivors(sweep.times, names)
        # an equal share of what is left, so that what a short sum does not need goes to the longer ones
        share = left / (len(sizes) - number)
        effort = Effort(REPETITIONS, max(0.0, share - sweep.words), CONTENDER_RATIO)
        sweep.measure(size, worth_measuring(size, names) or names, effort)
    sweep.refine()
    return sweep.end()


def measure_largest_first(
    communicator: Communicator, sizes: Sequence[int], *, dtype: torch.dtype, start: float, seconds: float
) -> Times:
    """Time every algorithm at the sizes, which rise, from the largest on that fits into the time. Collective.

    What fits, single sums show. So what time does not suffice for are the sizes that matter least to gradients; where
    not one fits nothing is measured. All ends seconds after start (of time.perf_counter), with time for one more word
    between the ranks; seconds must be the same on all of them. The rest is measure_times's.
    """
    sweep = _Sweep(communicator, start=start, seconds=seconds)
    if WORDS_TO_FIRST * sweep.word + sweep.words > sweep.left:
        return {}
    sweep.connect(sizes[-1], dtype)
    reached, sweep.left = climb(
        sweep.tensor_N, sweep.contestants, sizes[::-1], seconds=sweep.left, word=sweep.word, words=sweep.words
    )
    for number, size in enumerate(reached):
        # a smaller sum takes no longer than the last one
        if sweep.times and _seconds_again(sweep.times[reached[number - 1]]) + sweep.words > sweep.left:
            break
        share = SWEEP_SHARE * sweep.left / (len(reached) - number)
        sweep.measure(size, sweep.contestants, Effort(REPETITIONS, max(0.0, share - sweep.words), CONTENDER_RATIO))
    if sweep.times:
        sweep.refine()
    return sweep.end()


class _Sweep:
    """Measures sizes one after another, and keeps the time. Every method is a collective."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        start: float,
        seconds: float,
        on_size: Callable[[int, Mapping[str, Measured]], None] = lambda *_: None,
    ) -> None:
        """Look how dear words are. Measuring is to end seconds after start (of time.perf_counter)."""
        self.times: dict[int, dict[str, Measured]] = {}
        self._communicator, self._start, self._seconds, self._on_size = communicator, start, seconds, on_size
        before, now = (elapsed_seconds(communicator, start) for _ in range(2))
        self.word = now - before
        """Seconds in which ranks tell each other a time: of thousands, more than of a short sum."""
        self.words = WORDS_PER_SIZE * self.word
        """Seconds of all that they tell while one size is measured, and to the end."""
        self.left = seconds - now - self.word
        """Seconds after the word that tells them, the same on all ranks."""

    def connect(self, largest: int, dtype: torch.dtype) -> None:
        """Connect the groups of all algorithms, and take memory for the largest size."""
        self.contestants = self._communicator.with_every_algorithm()
        # one for all sizes: each measures its beginning
        self.tensor_N = self._communicator.allocate(largest // dtype.itemsize, dtype)
        self._look()

    def _look(self) -> None:
        self.left = self._seconds - elapsed_seconds(self._communicator, self._start) - self.word

    def measure(self, size: int, names: Iterable[str], effort: Effort) -> None:
        """Time these algorithms at a size, beside what was timed of them before, and look at the clock."""
        part_N = self.tensor_N[: size // self.tensor_N.itemsize]
        contestants = {name: self.contestants[name] for name in names}
        sums = time_sums(part_N, contestants, effort=effort, label=f"tuning at {size} bytes")
        _require_right(sums, size)
        before = self.times.setdefault(size, {})
        for name, each in sums.items():
            earlier = before[name].seconds if name in before else ()
            before[name] = Measured((*earlier, *each.measured.seconds))
        self._on_size(size, before)
        self._look()

    def refine(self) -> None:
        """Look where the choice is uncertain, while there is time."""
        while (open_choice := next_open(self.times, granularity=self.tensor_N.itemsize)) is not None:
            size, names = open_choice
            left = self.left - self.words
            each = sum(expected_seconds(self.times, size, name) for name in names)
            # + 2: the check of the sum, and the pilot, come first
            if (LEAST_REFINEMENT + 2) * each > left:
                break
            # a quarter, so that several open choices get their turn
            self.measure(size, names, Effort(REPETITIONS, left / 4))

    def end(self) -> Times:
        """Give the memory back, and return all times."""
        self._communicator.release(self.tensor_N)
        return self.times


def next_open(times: Times, *, granularity: int) -> tuple[int, list[str]] | None:
    """Choose a size to look at (again), and who contends there; None where the choice is clear everywhere.

    First between two sizes that choose differently and are far apart; then the size with the least certain choice.
    """
    table, sizes = make_hybrid(times), sorted(times)
    for a, b in pairwise(sizes):
        # the geometric middle, in whole elements
        middle = math.isqrt(a * b) // granularity * granularity
        if table.choose(a) != table.choose(b) and b > NARROW * a and middle not in times:
            both, chosen = [name for name in times[a] if name in times[b]], [table.choose(a), table.choose(b)]
            return middle, [name for name in both if name in chosen] or both or chosen
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
    """Estimate the seconds of an algorithm at a size that may not have been measured: that of the next larger one.

    Where there is none, that of the largest, as the bytes grow.
    """
    measured = [other for other in sorted(times) if name in times[other]]
    nearest = next((other for other in measured if other >= size), measured[-1])
    return times[nearest][name].median * max(1.0, size / nearest)


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
        if name not in before or name not in last:
            return False
        was, now = before[name].median / best_before.median, last[name].median / best_last.median
        noise = math.hypot(last[name].noise, best_last.noise)
        # now >= was: who catches up may overtake at a larger size
        return min(was, now - noise) >= LAG_RATIO and now >= was

    return [name for name in names if not is_behind(name)]


def _seconds_again(at_size: Mapping[str, Measured]) -> float:
    """Return the seconds of the shortest measurement of a size."""
    return SUMS_PER_SIZE * sum(each.median for each in at_size.values())


def _least_seconds_of(size: int, times: Times, names: Iterable[str]) -> float:
    """Estimate a check and two repetitions of each algorithm at the next size, if time grows as the bytes do."""
    last = max(times)
    return 3 * size / last * sum(times[last][name].median for name in survivors(times, names) if name in times[last])
