"""The gradient noise scale of a run, from squared norms that its steps measured: pure functions. Imports no torch.

B_simple = tr(Sigma) / |G|^2, where G is the gradient over all images and Sigma the covariance of the gradient of one
image. At this batch size noise and signal are equal in the gradient; above it larger batches save few steps
(McCandlish et al. 2018, arXiv 1812.06162, section 2.2). A gradient over b images has
E|G_b|^2 = |G|^2 + tr(Sigma) / b, so two batch sizes give unbiased estimates of both (appendix A.1). Their quotient is
biased, so both are averaged before the division.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeGuard

KIND = "noise"
"""Kind of the records of measurements."""
KEPT = 0.98
"""Decay per measurement: the running estimate covers about the last 50."""
FEWEST = 5
"""Least number of measurements for an estimate: with fewer its band is too wide."""
CONFIDENCE = 0.95
MAX_SQUARED = 1e100
"""Limit above any squared norm in fp32 (1.2e77) and any value computed from two of them."""


@dataclass(frozen=True)
class NoiseScale:
    """A noise scale in images and its band; None for a missing bound: the signal may be 0."""

    estimate: float | None
    low: float
    high: float | None

    def record(self) -> dict[str, float | None]:
        return {"noise_scale": self.estimate, "noise_scale_low": self.low, "noise_scale_high": self.high}


NOISE_SCALE_FIELDS = ("noise_scale", "noise_scale_low", "noise_scale_high")
NO_ESTIMATE: dict[str, float | None] = dict.fromkeys(NOISE_SCALE_FIELDS)
UNMEASURED = "not measured yet"
"""Text of a report in place of NO_ESTIMATE."""


def unbiased(small: float, large: float, *, small_batch: int, large_batch: int) -> tuple[float, float]:
    """Estimate tr(Sigma) and |G|^2 from squared norms of gradients over small_batch and large_batch images."""
    noise = (small - large) / (1 / small_batch - 1 / large_batch)
    signal = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    return noise, signal


@dataclass(frozen=True)
class Share:
    """Holds the signal's share of the global gradient's squared norm, |G|^2 / E|G_B|^2, and its variance.

    The noise scale is B * (1 / share - 1). The band is computed for the share, whose distribution is nearly normal: the
    noise scale itself has no mean if the signal may be 0.
    """

    mean: float
    variance: float
    num_measurements: float

    def noise_scale(self, *, global_batch_size: int) -> NoiseScale:
        """Return the noise scale, with the band by Student's distribution."""
        half = student_quantile((1 + CONFIDENCE) / 2, degrees=self.num_measurements - 1) * math.sqrt(self.variance)

        def images(share: float) -> float | None:
            # a share above 1 means noise below 0: by chance, if there is almost none
            return max(0.0, global_batch_size * (1 / share - 1)) if share > 0 else None

        return NoiseScale(images(self.mean), images(self.mean + half) or 0.0, images(self.mean - half))


@dataclass(frozen=True)
class Moments:
    """Holds weighted sums over measurements of |G|^2 (signal) and |G_B|^2 (square), for the noise scale."""

    weight: float = 0.0
    weight_squared: float = 0.0
    signal: float = 0.0
    square: float = 0.0
    signal_signal: float = 0.0
    signal_square: float = 0.0
    square_square: float = 0.0

    def add(self, signal: float, square: float, *, kept: float = 1.0) -> "Moments":
        """Return the sums with another measurement. kept: factor on the earlier ones."""
        return Moments(
            kept * self.weight + 1,
            kept**2 * self.weight_squared + 1,
            kept * self.signal + signal,
            kept * self.square + square,
            kept * self.signal_signal + signal * signal,
            kept * self.signal_square + signal * square,
            kept * self.square_square + square * square,
        )

    def share(self) -> Share | None:
        """Return the signal's share, with its variance by the delta method; None for fewer measurements than FEWEST.

        The variance of a quotient of means p = s / q is that of s_i - p * q_i, over n * q^2. With unequal weights n is
        their sum squared over the sum of their squares.
        """
        number = self.weight**2 / self.weight_squared if self.weight else 0.0
        if round(number) < FEWEST or self.square <= 0:  # in a running estimate a little less than the measurements
            return None
        mean = self.signal / self.square
        residual = self.signal_signal - 2 * mean * self.signal_square + mean**2 * self.square_square
        spread = max(0.0, residual / self.weight) * number / (number - 1)
        return Share(mean, spread / number / (self.square / self.weight) ** 2, number)

    def noise_scale(self, *, global_batch_size: int) -> NoiseScale | None:
        """Return the noise scale of the added measurements; None for too few."""
        share = self.share()
        return share.noise_scale(global_batch_size=global_batch_size) if share else None


def measured(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yield signal and squared norm of each measurement among records; leaves out impossible values."""
    for record in records:
        signal, square = record.get("signal"), record.get("global_squared_norm")
        if record["kind"] == KIND and _can_be_measured(signal) and _can_be_measured(square) and square >= 0:
            yield signal, square


def _can_be_measured(value: object) -> TypeGuard[float]:
    """Return whether a value is a number whose square and products are finite; False for NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_SQUARED


def running(records: Iterable[Mapping[str, Any]], *, start: Moments | None = None) -> Moments:
    """Add records of measurements to the sums of the running estimate."""
    moments = start or Moments()
    for signal, square in measured(records):
        moments = moments.add(signal, square, kept=KEPT)
    return moments


def describe_noise_scale(record: Mapping[str, Any], *, unit: str = "") -> str:
    """Return a record's noise scale as text, with its band, and the unit behind a number."""
    estimate, low, high = (record[name] if _can_be_measured(record.get(name)) else None for name in NOISE_SCALE_FIELDS)
    if low is None:
        return UNMEASURED
    if estimate is None:
        return f"above {low:,.0f}{unit}"
    return f"{estimate:,.0f} ({low:,.0f} to {'no bound' if high is None else f'{high:,.0f}'}){unit}"


def student_quantile(probability: float, *, degrees: float) -> float:
    """Return the quantile of Student's distribution by its expansion in 1 / degrees: within 1% from 3 degrees on.

    Source: Abramowitz and Stegun 1964, 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
