"""Seconds per image from a measured step, and the error band of a simulated step. Pure."""

import math

from bigbatch.launch.simulate.step import Compute, Job, SimulatedStep

PRECISION = 1e-4
"""Relative precision of the seconds of an image."""
NORMAL_90 = 1.645
"""Standard deviations on each side of the 90% interval of a normal distribution."""
RATE_SPREAD = {"ladder": 0.035, "device": 0.07, "other": 0.5}
"""Standard deviation of a device's images per second: between sizes of one system, between systems of one device
(PUBLISHED: 3% of H100, to 20% of A100, between submitters), and where another device stands in its place."""
COMMUNICATION_SPREAD, FIXED_SPREAD, STRAGGLER_SPREAD = 0.6, 0.6, 1.0
"""Standard deviation of each of these parts, as a share of it. ASSUMED, and checked against published rows."""


def fit_compute(
    job: Job, fixed_seconds: float, local_batch: float, seconds: float, *, num_microbatches: int = 1
) -> Compute:
    """Find the seconds of an image with which a job's simulated step takes the given seconds."""
    low, high = 0.0, seconds / local_batch
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        step = job.simulate(Compute(middle, fixed_seconds), local_batch, num_microbatches=num_microbatches)
        low, high = (low, middle) if step.seconds > seconds else (middle, high)
    return Compute(high, fixed_seconds)


def reach_of(step: SimulatedStep, *, fixed_seconds: float, rate: float, doubt: float = 1.0) -> float:
    """Return the factor below and above a step's seconds of its 90% interval.

    rate: the spread of computing; doubt: of the model's own parts, 1 where no second row has checked them.
    """
    parts = (
        rate,
        doubt * COMMUNICATION_SPREAD * step.communication / step.seconds,
        doubt * FIXED_SPREAD * fixed_seconds / step.seconds,
        doubt * STRAGGLER_SPREAD * step.stragglers / step.seconds,
    )
    return math.exp(NORMAL_90 * math.hypot(*parts))
