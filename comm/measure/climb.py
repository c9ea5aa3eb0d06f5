"""Find the largest sum that the remaining time allows: single sums, each larger than the last. Collective."""

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.measure.timing import slowest, wait_for

FIRST_BYTES = 4096
STEP = 64
"""Largest ratio of one size to the one before: a probe of that many fewer bytes must show that it fits."""
SUMS_PER_SIZE = 3
"""Least number of sums to measure a size: a check and two repetitions."""


def climb(
    tensor_N: Tensor,
    communicators: Mapping[str, Communicator],
    sizes: Sequence[int],
    *,
    seconds: float,
    word: float,
    words: float,
) -> tuple[tuple[int, ...], float]:
    """Find the first of the sizes, which fall, that can be measured in that many seconds, by smaller sums' times.

    Return it with those that follow, and the seconds left; no sizes if none can be measured. Keeps within the time
    unless the first sums, of FIRST_BYTES and twice that, take longer, as connections open with them. tensor_N: of the
    largest size, its content is lost; word: seconds in which ranks exchange a time; words: seconds of all exchanges
    while one size is measured.
    """
    if word + words > seconds:
        return (), seconds
    start = time.perf_counter()
    first, second = (min(size, sizes[0]) for size in (FIRST_BYTES, 2 * FIRST_BYTES))
    # both, exchanged together: how a time grows with the bytes. Connections open with the one before
    (_, at_first, at_second), elapsed = _sum_once(tensor_N, communicators, (first, first, second), start=start)
    probes = [(first, at_first), (second, at_second)]
    while True:
        # the exchange of the last probe's time came after it
        left = seconds - elapsed - word
        largest = probes[-1][0]
        affordable = (left - word - words) / (1 + SUMS_PER_SIZE)
        larger = [size for size in sizes if largest < size <= STEP * largest and _estimate(probes, size) <= affordable]
        if not larger:
            break
        (took,), elapsed = _sum_once(tensor_N, communicators, larger[:1], start=start)
        probes.append((larger[0], took))
    for place, size in enumerate(sizes):
        if size <= largest and SUMS_PER_SIZE * _estimate(probes, size) + words <= left:
            return tuple(sizes[place:]), left
    return (), left


def _sum_once(
    tensor_N: Tensor, communicators: Mapping[str, Communicator], sizes: Sequence[int], *, start: float
) -> tuple[list[float], float]:
    """Sum each size once by each algorithm; return the slowest rank's seconds of each size, and those since start."""
    seconds = []
    for size in sizes:
        part_N, before = tensor_N[: size // tensor_N.itemsize].zero_(), time.perf_counter()
        for name, communicator in communicators.items():
            communicator.sum_(part_N, label=f"first sum of {size} bytes by {name}")
            wait_for(communicator.device)
        seconds.append(time.perf_counter() - before)
    since = time.perf_counter() - start
    *every, elapsed = slowest({"": [*seconds, since]}, next(iter(communicators.values())))[""]
    return every, elapsed


def _estimate(probes: Sequence[tuple[int, float]], size: int) -> float:
    """Estimate the seconds of a size: by the line through the two largest probes that are no larger.

    At most in proportion to the bytes, and never less than those of a smaller size.
    """
    smaller = [probe for probe in probes if probe[0] <= size][-2:] or probes[:1]
    (first, at_first), (last, at_last) = smaller[0], smaller[-1]
    slope = max(0.0, (at_last - at_first) / (last - first)) if last > first else float("inf")
    return min(at_last + slope * (size - last), at_last * size / last) if size > last else at_last
