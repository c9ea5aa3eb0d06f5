"""Time every algorithm at several sizes within a time limit, mostly at sizes where the choice is uncertain."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch

from bigbatch.comm.algorithms.by_name import choose_algorithm
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, MeasuredTimes, Times, make_hybrid
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.errors import CommError
from bigbatch.tools.measure.hangs import HungError, limited, sum_label
from bigbatch.tools.measure.timing import MIN_REPETITIONS, TimeBudget, loops_of, slowest, time_sums
from bigbatch.trainer.machine.host import wait_for

SMALLEST_BYTES = 1024
FACTOR = 4
REPETITIONS = 100
MAX_REPETITIONS = 400
CONTENDER_RATIO = 1.5
"""If time is short, an algorithm that is slower than the best by more than this ratio is timed once."""
FIRST_SHARE = 0.6
"""Share of the time for all sizes; the rest is for sizes with an uncertain choice."""
MAX_NOISE = 0.02
"""A choice is measured again only if two contenders' joint noise exceeds this; two such errors stay below 4%."""
MAX_SIZE_RATIO = 1.5
"""If two neighbouring sizes choose differently and differ by more than this ratio, one between them is measured."""
MIN_REFINEMENT = 5
"""Fewest repetitions for which a second measurement is worth its check."""
LARGEST_BYTES = 256 << 20
BANDWIDTH_BOUND_BYTES = 1_000_000
"""Above this size bandwidth dominates latency. If a size from this on was measured, the choice for the largest measured
size also holds for larger sums."""
MAX_SPREAD = 0.5
"""Largest credible spread of the fastest algorithm's times at half of the sizes: on quiet hosts it is below 0.3."""
MAX_GROWTH = 2.0
"""Largest credible ratio of an algorithm's time to its time for more bytes."""
EXCHANGES_PER_SIZE = 5
"""Exchanges of times and texts between ranks after a check of the clock: up to three while a size is measured, one at
the next check, one at the end."""
EXCHANGES_TO_FIRST = 4
"""Exchanges before the first size: when groups connect, at a check of the clock, and after two probes."""
FIRST_PROBE_BYTES = 4096
PROBE_STEP = 64
"""Largest ratio of a size to the largest probe from which its time is estimated."""
SUMS_PER_SIZE = 3
"""Least number of sums to measure a size: a check and two repetitions."""


def sizes_up_to(num_bytes: int) -> tuple[int, ...]:
    """Return the sizes to measure: num_bytes (at most 256 MiB), a quarter of it, and so on to a KiB; ascending."""
    sizes = [min(max(num_bytes, SMALLEST_BYTES), LARGEST_BYTES) // 8 * 8]
    while sizes[-1] // FACTOR >= SMALLEST_BYTES:
        sizes.append(sizes[-1] // FACTOR // 8 * 8)
    return tuple(reversed(sizes))


def make_table(times: Times, *, beyond: str) -> HybridTable:
    """Return the hybrid table, with `beyond` as its default; it also sums larger buffers if only short ones were timed.

    That happens if slow links or many ranks left no time for sums of BANDWIDTH_BOUND_BYTES, or for any sum.
    """
    if not times:
        return HybridTable((HybridRow(None, beyond),))
    table, largest = make_hybrid(times, default=beyond), max(times)
    last = table.rows[-1].algorithm
    if largest >= BANDWIDTH_BOUND_BYTES or last == beyond:
        return table
    return HybridTable((*table.rows[:-1], HybridRow(largest, last), HybridRow(None, beyond)))


@dataclass(frozen=True)
class SumTimes:
    """The times of all-reduces by size, and the choice that they lead to."""

    times: Times
    table: HybridTable
    hung: Mapping[str, str]
    """Algorithms that hang, and so have no times: name -> message."""
    disturbance: str = ""
    """What shows that other work disturbed the times, so that the table is the default; "" if nothing does."""


def measure_sums(
    communicator: Communicator,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype,
    seconds: float,
    start: float,
    default: str | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> SumTimes:
    """Time every algorithm at these ascending sizes, beginning with the largest that fits into the time. Collective.

    - Single sums show which size fits; if none fits, nothing is measured. If time runs out, short sizes are missing.
    - If time is short, algorithms far from the best are timed only once.
    - The default (None: auto's choice without a table) stays if no other algorithm is faster beyond noise, and at all
      sizes if other work disturbed the times, except with force.
    - Then sizes between two with different choices are measured, and sizes with an uncertain choice are repeated.
    - If an algorithm hangs, it is left out and all begins again; the time until then does not count.
    It ends `seconds` (equal on all ranks) after start (of time.perf_counter), with time for one more exchange of texts
    between the ranks. say: called with each line of results.
    Raises: CommError if a sum was wrong, or if all algorithms hang; PeerLostError.
    """
    sweep = _Sweep(communicator, start=start, seconds=seconds, say=say)
    if EXCHANGES_TO_FIRST * sweep.exchange_seconds + sweep.size_exchange_seconds <= sweep.left:
        sweep.run(sizes, dtype)
    default = default or choose_algorithm(communicator.transport.backend, table=None).algorithm
    beyond = next(name for name in (default, *communicator.transport.algorithms) if name not in sweep.hung)
    disturbance = "" if force else find_disturbance(sweep.times)
    table = make_table({} if disturbance else sweep.times, beyond=beyond)
    return SumTimes(sweep.times, table, sweep.hung, disturbance)


def find_disturbance(times: Times) -> str:
    """Return what shows that other work on the hosts disturbed the times; "" if nothing does."""
    best = {size: min(at_size.values(), key=lambda each: each.median) for size, at_size in times.items()}
    spreads = sorted((each.spread, size) for size, each in best.items() if len(each.seconds) > MIN_REPETITIONS)
    spread, size = spreads[len(spreads) // 2] if spreads else (0.0, 0)
    if spread > MAX_SPREAD:
        return f"the middle half of the repetitions at {size:,} bytes spreads over {spread:.0%}"
    for fewer, more in combinations(sorted(times), 2):
        for name, each in times[fewer].items():
            other = times[more].get(name, each)
            if len(each.seconds) > MIN_REPETITIONS and each.median > MAX_GROWTH * other.median:
                took = f"{each.median * 1e3:.3g} ms for {fewer:,} bytes, but {other.median * 1e3:.3g} ms for {more:,}"
                return f"{name} took {took}"
    return ""


class _Sweep:
    """Measures sizes one after another within the time. Every method is a collective."""

    def __init__(self, communicator: Communicator, *, start: float, seconds: float, say: Callable[[str], None]) -> None:
        """Measure the cost of an exchange of texts. Measuring must end `seconds` after start (of time.perf_counter)."""
        self.times: dict[int, dict[str, MeasuredTimes]] = {}
        self.hung: dict[str, str] = {}
        self._communicator, self._start, self._seconds, self._say = communicator, start, seconds, say
        before, now = (elapsed_seconds(communicator.connection, start) for _ in range(2))
        self.exchange_seconds = now - before
        """Seconds in which ranks exchange a time: with thousands of ranks, longer than a short sum."""
        self.size_exchange_seconds = EXCHANGES_PER_SIZE * self.exchange_seconds
        """Seconds of all exchanges while one size is measured, and until the end."""
        self.left = seconds - now - self.exchange_seconds
        """Seconds left after the exchange that agrees on them, the same on all ranks."""

    def run(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        """Measure ascending sizes by all algorithms but those that hang. Raises: CommError if all hang."""
        communicator, begin = self._communicator, time.perf_counter()
        while True:
            self.times.clear()
            self.contestants = communicator.with_every_algorithm(but=self.hung)
            # one tensor for all sizes: each size uses its first elements
            self.tensor_N = communicator.allocate(sizes[-1] // dtype.itemsize, dtype)
            self._exchange()
            try:
                with limited(communicator.connection):
                    self._measure_all(sizes)
            except HungError as error:
                self.hung[error.algorithm] = str(error)
                self._say(str(error))
                if self.hung.keys() >= set(communicator.transport.algorithms):
                    raise CommError(f"every all-reduce hangs: {', '.join(self.hung)}") from None
                self._start, begin = self._start + time.perf_counter() - begin, time.perf_counter()
            else:
                communicator.transport.release(self.tensor_N)
                return

    def _measure_all(self, sizes: Sequence[int]) -> None:
        """Measure these ascending sizes, beginning with the largest that fits into the time. Raises: HungError."""
        reached = self.find_affordable(sizes[::-1])
        for number, size in enumerate(reached):
            if self.times:  # a smaller sum takes no longer than the last one
                again = SUMS_PER_SIZE * sum(each.median for each in self.times[reached[number - 1]].values())
                if again + self.size_exchange_seconds > self.left:
                    break
            # an equal share of the remaining time, so that time which short sums do not need goes to longer ones
            share = FIRST_SHARE * self.left / (len(reached) - number)
            budget = TimeBudget(REPETITIONS, max(0.0, share - self.size_exchange_seconds), CONTENDER_RATIO)
            self.measure(size, self.contestants, budget)
        if self.times:
            self.refine()

    def _exchange(self, *seconds: float) -> list[float]:
        """Return the slowest rank's seconds, and update the time left."""
        *every, elapsed = slowest([*seconds, time.perf_counter() - self._start], self._communicator.connection)
        self.left = self._seconds - elapsed - self.exchange_seconds
        return every

    def find_affordable(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the part of these descending sizes that can be measured in the time left, by smaller sums' times.

        It begins with the first size that can be measured, and is empty if none can. Keeps within the time unless the
        first sums, of FIRST_PROBE_BYTES and twice that, take longer because connections open.
        """
        if self.exchange_seconds + self.size_exchange_seconds > self.left:
            return ()
        first, second = (min(size, sizes[0]) for size in (FIRST_PROBE_BYTES, 2 * FIRST_PROBE_BYTES))
        # the first sum opens connections; the other two show how the time grows with the bytes; one exchange for all
        _, at_first, at_second = self._sum_once(first, first, second)
        probes = [(first, at_first), (second, at_second)]
        while True:
            largest = probes[-1][0]
            affordable = (self.left - self.exchange_seconds - self.size_exchange_seconds) / (1 + SUMS_PER_SIZE)
            near = [size for size in sizes if largest < size <= PROBE_STEP * largest]
            larger = [size for size in near if _estimate(probes, size) <= affordable]
            if not larger:
                break
            (took,) = self._sum_once(larger[0])
            probes.append((larger[0], took))
        for place, size in enumerate(sizes):
            seconds = SUMS_PER_SIZE * _estimate(probes, size)
            if size <= largest and seconds + self.size_exchange_seconds <= self.left:
                return sizes[place:]
        return ()

    def _sum_once(self, *sizes: int) -> list[float]:
        """Sum each size once by each algorithm; return the slowest rank's seconds of each size."""
        seconds = []
        for size in sizes:
            part_N, start = self.tensor_N[: size // self.tensor_N.itemsize].zero_(), time.perf_counter()
            for name, communicator in self.contestants.items():
                communicator.sum_(part_N, label=sum_label(f"first sum of {size} bytes", name))
                wait_for(communicator.device)
            seconds.append(time.perf_counter() - start)
        return self._exchange(*seconds)

    def measure(self, size: int, names: Iterable[str], budget: TimeBudget) -> None:
        """Time these algorithms at a size, merge with earlier times, and check the clock."""
        part_N = self.tensor_N[: size // self.tensor_N.itemsize]
        contestants = {name: self.contestants[name] for name in names}
        before = self.times.setdefault(size, {})
        for name, each in time_sums(part_N, contestants, budget=budget, label=f"tuning at {size} bytes").items():
            if each.num_wrong:
                raise CommError(
                    f"{name} summed {each.num_wrong} elements of {size} bytes wrongly: run bigbatch comm bench, and do "
                    "not train with it on this cluster"
                )
            earlier = before[name].seconds if name in before else ()
            before[name] = MeasuredTimes((*earlier, *each.measured.seconds))
        self._say(times_line(size, before, self._communicator.transport.algorithms))
        self._exchange()

    def refine(self) -> None:
        """Measure again where the choice is uncertain, while there is time."""
        while (open_choice := next_uncertain(self.times, granularity=self.tensor_N.itemsize)) is not None:
            size, names = open_choice
            left = self.left - self.size_exchange_seconds
            expected = [_expected_seconds(self.times, size, name) for name in names]
            each = sum(expected) * loops_of(min(expected))
            # twice: the check of the sum, and first timings, come before
            if 2 * MIN_REFINEMENT * each > left:
                break
            # a quarter, so that several open choices get a turn, but enough for a useful measurement
            self.measure(size, names, TimeBudget(REPETITIONS, max(left / 4, MIN_REFINEMENT * each)))


def _estimate(probes: Sequence[tuple[int, float]], size: int) -> float:
    """Return a size's estimated seconds, by the line through the two largest probes that are no larger.

    The estimate grows at most in proportion to the bytes, and is never less than the largest probe's time.
    """
    smaller = [probe for probe in probes if probe[0] <= size][-2:] or probes[:1]
    (first, at_first), (last, at_last) = smaller[0], smaller[-1]
    slope = max(0.0, (at_last - at_first) / (last - first)) if last > first else float("inf")
    return min(at_last + slope * (size - last), at_last * size / last) if size > last else at_last


def next_uncertain(times: Times, *, granularity: int) -> tuple[int, list[str]] | None:
    """Return the next size to measure, and its contenders; None if the choice is clear at all sizes.

    First a size between two that choose differently and are far apart; then the size with the least certain choice.
    """
    table, sizes = make_hybrid(times), sorted(times)
    for a, b in pairwise(sizes):
        # the geometric middle, in whole elements
        middle = math.isqrt(a * b) // granularity * granularity
        if table.choose(a) != table.choose(b) and b > MAX_SIZE_RATIO * a and middle not in times:
            both, chosen = [name for name in times[a] if name in times[b]], [table.choose(a), table.choose(b)]
            return middle, [name for name in both if name in chosen] or both or chosen
    doubts = {size: _uncertainty(times[size]) for size in sizes}
    doubt, size = max((doubt, size) for size, (doubt, _) in doubts.items())
    return (size, doubts[size][1]) if doubt > MAX_NOISE else None


def _uncertainty(at_size: Mapping[str, MeasuredTimes]) -> tuple[float, list[str]]:
    """Return the uncertainty of the choice and its contenders; 0 if it is clear, or was measured often enough."""
    best = min(at_size, key=lambda name: at_size[name].median)
    open_ones = {
        name: noise
        for name, measured in at_size.items()
        if name != best
        and (noise := measured.joint_noise(at_size[best])) >= measured.median / at_size[best].median - 1
        and len(measured.seconds) < MAX_REPETITIONS
    }
    return max(open_ones.values(), default=0.0), [best, *open_ones]


def _expected_seconds(times: Times, size: int, name: str) -> float:
    """Return an algorithm's estimated seconds at a size: those measured at this or the next larger size.

    Without a larger one, those of the largest size, in proportion to the bytes.
    """
    measured = [other for other in sorted(times) if name in times[other]]
    nearest = next((other for other in measured if other >= size), measured[-1])
    return times[nearest][name].median * max(1.0, size / nearest)


def times_line(size: int, at_size: Mapping[str, MeasuredTimes], names: Sequence[str]) -> str:
    """Return the table row of one size: a column per algorithm, '-' for one that was not measured."""
    best = min(at_size.values(), key=lambda each: each.median)
    cells = {
        name: f"{each.median * 1e3:.3f} ±{f'{each.noise:.0%}' if len(each.seconds) > 1 else '?'}"
        + ("*" if each.median / best.median - 1 <= each.joint_noise(best) else " ")
        for name, each in at_size.items()
    }
    columns = "".join(f"{cells.get(name, '- '):>16}" for name in names)
    return f"{size:>12}{columns}   n = {max(len(each.seconds) for each in at_size.values())}"


def elapsed_seconds(connection: Connection, start: float) -> float:
    """Return the seconds since start (of time.perf_counter), equal on all ranks: so they decide alike. Collective."""
    return slowest([time.perf_counter() - start], connection)[0]
