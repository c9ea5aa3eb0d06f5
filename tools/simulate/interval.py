"""90% intervals of predicted steps: each cause moved by its spread, times a calibrated factor. Pure."""

import math
from dataclasses import dataclass, replace

from bigbatch.tools.simulate.step import Compute, SimulatedJob, SimulatedStep

RATE_SPREAD = {"same_system": 0.035, "same_device": 0.07, "other_device": 0.5}
"""Standard deviation of a device's images per second, if the rate is from another size of its system, from another
system with this device (PUBLISHED: 3% of H100, to 20% of A100, between submitters), or from another device."""
LINK_FACTOR, UNKNOWN_LINK_FACTOR = 1.8, 3.0
"""Factor by which sums may be slower or faster: over links with a stated rate, and without. ASSUMED."""
UNCHECKED_REACH = (0.068, 0.524)
"""Least half widths below and above a step, as logarithms, if few published systems use its carrier or framework.
Split conformal: each end misses 5% of the rows of such systems, and most of these were slower than predicted."""
FIXED_SPREAD, STRAGGLER_SPREAD = 0.6, 1.0
"""Standard deviations of a step's fixed time and of its stragglers' time, as shares of these. ASSUMED."""
FACTORS = {"same_system": 1.62, "other_system": 1.69}
"""Standard deviations on each side of the 90% interval, if the rate is from a step of the same system or of another.
Split conformal: 90% quantiles of the errors of systems which neither constants nor factors had seen, with the same
weight for each system (benchmarks/twin/leave_out.py)."""
POWER_SPREAD = 0.15
"""Standard deviation of a device's power. PUBLISHED: what the other devices' mean share of their limits misses of the
share of each."""
IDLE_SHARE = 0.25
"""Least power while a device waits, as a share of that of training. ASSUMED."""


@dataclass(frozen=True)
class Uncertainty:
    """Uncertainty about one system, in addition to that of every prediction."""

    rate: float = RATE_SPREAD["same_system"]
    """Standard deviation of its devices' rate."""
    kind: str = "same_system"
    """A key of FACTORS."""
    has_unknown_link: bool = False
    """Whether the rate of the network is not stated: then sums may also wait for backward's end."""
    is_unchecked: bool = False
    """Whether few published rows across nodes use its framework."""


@dataclass(frozen=True)
class Interval:
    """Ends of a step's 90% interval in seconds; its spreads, as logarithms; base: these without UNCHECKED_REACH."""

    low: float
    high: float
    below: float
    above: float
    base: tuple[float, float]


def interval_of(
    job: SimulatedJob,
    compute: Compute,
    step: SimulatedStep,
    local_batch: float,
    uncertainty: Uncertainty,
    *,
    num_microbatches: int = 1,
) -> Interval:
    """Return a simulated step's 90% interval: the root of the sum of squares of each cause's spread, times a factor."""
    factor_of_sums = UNKNOWN_LINK_FACTOR if uncertainty.has_unknown_link else LINK_FACTOR

    def seconds(factor: float) -> float:
        moved = replace(job, all_reduce_time_factor=factor)
        return moved.simulate(compute, local_batch, num_microbatches=num_microbatches).seconds

    slower, faster = seconds(factor_of_sums), seconds(1 / factor_of_sums)
    if uncertainty.has_unknown_link:  # perhaps backward hides no communication
        slower = max(slower, step.seconds + step.hidden)
    parts = (
        uncertainty.rate,
        FIXED_SPREAD * num_microbatches * compute.fixed_seconds / step.seconds,
        STRAGGLER_SPREAD * step.stragglers / step.seconds,
    )
    base = math.hypot(*parts, math.log(step.seconds / faster)), math.hypot(*parts, math.log(slower / step.seconds))
    reach = FACTORS[uncertainty.kind]
    least = UNCHECKED_REACH if uncertainty.is_unchecked or job.network.has_few_measurements else (0.0, 0.0)
    below, above = (max(spread, each / reach) for spread, each in zip(base, least, strict=True))
    return Interval(step.seconds * math.exp(-reach * below), step.seconds * math.exp(reach * above), below, above, base)


def energy_factors(interval: Interval, kind: str, waiting: float) -> tuple[float, float]:
    """Return the ends of the 90% interval of a step's energy, as factors of it: both time and power vary.

    waiting: share of the step in which devices wait.
    """
    below, above = (FACTORS[kind] * math.hypot(spread, POWER_SPREAD) for spread in (interval.below, interval.above))
    return math.exp(-below) * (1 - (1 - IDLE_SHARE) * waiting), math.exp(above)
