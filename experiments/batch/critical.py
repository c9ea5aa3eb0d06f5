"""The critical batch of a whole run, and what other batches cost: pure functions.

At batch B a step makes 1 / (1 + B_noise / B) of the progress of a step over all images. If a run at batch B needs S
steps and E = B * S images to reach a loss, then S / S_min = 1 + B_crit / B and E / E_min = 1 + B / B_crit.
B_crit = E_min / S_min is the mean of B_noise over progress (McCandlish et al. 2018, arXiv 1812.06162, appendix D).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bigbatch.trainer.report.noise_scale import FEWEST, Moments, NoiseScale, Share

FEWEST_IN_SEGMENT = 20
"""Least number of measurements over which the noise scale is taken as constant."""
MAX_SEGMENTS = 20
WIDE_BAND_RATIO = 4.0
"""Ratio of a band's upper end to its lower end, above which a recommendation is in doubt."""
DOUBLINGS = 3
"""Doublings to each side of the recommended batch that the table shows."""

Pair = tuple[float, float]
"""Signal and square of a measurement, as Moments takes them."""


@dataclass(frozen=True)
class BatchCost:
    """Cost of a batch, relative to the fewest possible steps and images."""

    global_batch_size: int
    steps: float
    images: float


def segments(pairs: Sequence[Pair]) -> list[Share]:
    """Cut a run into parts with the same number of measurements, and return the signal's share of each part."""
    count = max(1, min(MAX_SEGMENTS, len(pairs) // FEWEST_IN_SEGMENT))
    bounds = [round(index * len(pairs) / count) for index in range(count + 1)]
    shares = [_moments(pairs[low:high]).share() for low, high in pairwise(bounds)]
    return [share for share in shares if share is not None]


def _moments(pairs: Sequence[Pair]) -> Moments:
    moments = Moments()
    for signal, square in pairs:
        moments = moments.add(signal, square)
    return moments


def critical_batch(shares: Sequence[Share], *, global_batch_size: int) -> NoiseScale:
    """Return the critical batch of a run from the signal's share in each of its parts, which are equally long.

    The progress of a step is the share of signal in it, p = 1 / (1 + B_noise / B), so the mean of B_noise over progress
    is B * mean(1 - p) / mean(p): the noise scale of the mean share.
    """
    count = len(shares)
    mean = Share(
        sum(share.mean for share in shares) / count,
        sum(share.variance for share in shares) / count**2,
        sum(share.num_measurements - 1 for share in shares) + 1,
    )
    return mean.noise_scale(global_batch_size=global_batch_size)


def thirds(pairs: Sequence[Pair], *, global_batch_size: int) -> list[NoiseScale]:
    """Return the noise scale early in the run, in its middle and late; empty for a run that is too short."""
    third = len(pairs) // 3
    if third < FEWEST:
        return []
    shares = [_moments(part).share() for part in (pairs[:third], pairs[third:-third], pairs[-third:])]
    return [share.noise_scale(global_batch_size=global_batch_size) for share in shares if share is not None]


def recommended(critical: float, *, microbatch_size: int, num_train: int | None = None) -> int:
    """Return the microbatch, doubled to come nearest to the critical batch by ratio, but at most to num_train.

    A step takes no image twice, so no batch is larger than the training set.
    """
    doublings = max(0, round(math.log2(max(critical, 1.0) / microbatch_size)))
    if num_train is not None:
        doublings = min(doublings, max(1, num_train // microbatch_size).bit_length() - 1)
    return microbatch_size * 2**doublings


def batch_costs(critical: float, *, microbatch_size: int, own: int, num_train: int | None = None) -> list[BatchCost]:
    """List batches around the recommended one, and the run's batch, with the steps and images that they need."""
    best = recommended(critical, microbatch_size=microbatch_size, num_train=num_train)
    around = {best * 2**power for power in range(DOUBLINGS + 1) if num_train is None or best * 2**power <= num_train}
    around |= {best // 2**power for power in range(1, DOUBLINGS + 1) if best % (microbatch_size * 2**power) == 0}
    return [BatchCost(batch, 1 + critical / batch, 1 + batch / max(critical, 1.0)) for batch in sorted(around | {own})]


def rate_factor(critical: float, *, old: int, new: int) -> float:
    """Return the factor of SGD's best rate from one batch to another: the rate is proportional to 1 / (1 + B_crit / B).

    Source: McCandlish et al. 2018, section 2.2.
    """
    return (1 + critical / old) / (1 + critical / new)


def is_in_doubt(found: NoiseScale) -> bool:
    return found.high is None or found.high > WIDE_BAND_RATIO * max(found.low, 1.0)
