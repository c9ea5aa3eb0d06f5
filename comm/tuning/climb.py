"""How large a sum may be measured in the time that there is: single sums, each larger than the last. Collective."""

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.tuning.measure import slowest, wait_for

FIRST_BYTES = 4096
STEP = 8
"""From one size to the next, but for the second, which is twice the first: it shows how far a time grows with bytes."""
SUMS_PER_SIZE = 3
"""What measuring a size takes at least: a check and two repetitions."""


def climb(
    tensor_N: Tensor,
    communicators: Mapping[str, Communicator],
    sizes: Sequence[int],
    *,
    seconds: float,
    word: float,
    words: float,
) -> tuple[tuple[int, ...], float]:
    """Find the first of the sizes, which fall, that can be measured in so many seconds, by smaller sums' times.

    Return it with those that follow, and the seconds that measuring it takes at least; nothing where none can.
    tensor_N: of the largest size, its content is lost; word: the seconds in which ranks tell each other a time, words:
    those of all that they tell while one size is measured.
    """
    start = time.perf_counter()
    steps = [FIRST_BYTES, 2 * FIRST_BYTES]
    while steps[-1] < sizes[0]:
        steps.append(STEP * steps[-1])
    steps = [*(step for step in steps if step < sizes[0]), sizes[0]]
    _sum_once(tensor_N, communicators, steps[0], start=start)  # connections open
    probes: list[tuple[int, float]] = []
    left = seconds
    for size in steps:
        if probes and (1 + SUMS_PER_SIZE) * _estimate(probes, size) + word + words > left:
            break
        took, elapsed = _sum_once(tensor_N, communicators, size, start=start)
        probes.append((size, took))
        left = seconds - elapsed
    for place, size in enumerate(sizes):
        needed = SUMS_PER_SIZE * _estimate(probes, size) + words
        if size <= probes[-1][0] and needed <= left:
            return tuple(sizes[place:]), needed
    return (), 0.0


def _sum_once(
    tensor_N: Tensor, communicators: Mapping[str, Communicator], size: int, *, start: float
) -> tuple[float, float]:
    """Sum once by each algorithm; return the slowest rank's seconds of all of them, and those since start."""
    part_N, before = tensor_N[: size // tensor_N.itemsize].zero_(), time.perf_counter()
    for name, communicator in communicators.items():
        communicator.sum_(part_N, label=f"first sum of {size} bytes by {name}")
        wait_for(communicator.device)
    now = time.perf_counter()
    every = slowest({"": [now - before, now - start]}, next(iter(communicators.values())))[""]
    return every[0], every[1]


def _estimate(probes: Sequence[tuple[int, float]], size: int) -> float:
    """Estimate the seconds of a size: by the line through the two largest probes that are no larger.

    At most as the bytes grow, and never less than those of a smaller one.
    """
    smaller = [probe for probe in probes if probe[0] <= size][-2:] or probes[:1]
    (first, at_first), (last, at_last) = smaller[0], smaller[-1]
    slope = max(0.0, (at_last - at_first) / (last - first)) if last > first else float("inf")
    return min(at_last + slope * (size - last), at_last * size / last) if size > last else at_last
