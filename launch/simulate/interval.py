"""90% intervals of predicted steps: each cause moved by its spread, times a calibrated factor. Pure."""

import math
from dataclasses import dataclass, replace

from bigbatch.launch.simulate.step import Compute, SimulatedJob, SimulatedStep

RATE_SPREAD = {"ladder": 0.035, "device": 0.07, "other": 0.5}
"""Standard deviation of a device's images per second: between sizes of one system, between systems of one device
(PUBLISHED: 3% of H100, to 20% of A100, between submitters), and if the rate is another device's."""
LINK_FACTOR, UNKNOWN_LINK_FACTOR = 1.8, 3.0
"""Factor by which sums may be slower or faster: over links with a stated rate, and without. ASSUMED."""
UNCHECKED_CARRIERS = ("servers", "sockets")
"""Carriers with published rows across nodes from fewer than three systems."""
UNCHECKED_SPREAD = 0.12
"""Standard deviation of a step of a carrier or framework that hardly any published row has checked. ASSUMED."""
FIXED_SPREAD, STRAGGLER_SPREAD = 0.6, 1.0
"""Standard deviations of a step's fixed time and of its stragglers' time, as shares of these. ASSUMED."""
FACTORS = {"ladder": 1.62, "stranger": 1.69}
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

    rate: float = RATE_SPREAD["ladder"]
    """Standard deviation of its devices' rate."""
    kind: str = "ladder"
    """A key of FACTORS."""
    has_unknown_link: bool = False
    """Whether the rate of the network is not stated: then sums may also wait for backward's end."""
    is_unchecked: bool = False
    """Whether published rows across nodes have hardly checked such a carrier or framework."""


@dataclass(frozen=True)
class Interval:
    """Ends of a step's 90% interval in seconds, and the spreads, as logarithms, from which they follow."""

    low: float
    high: float
    below: float
    above: float


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
    factor = UNKNOWN_LINK_FACTOR if uncertainty.has_unknown_link else LINK_FACTOR

    def seconds(slowness: float) -> float:
        moved = replace(job, slowness=slowness).simulate(compute, local_batch, num_microbatches=num_microbatches)
        return moved.seconds

    slower, faster = seconds(factor), seconds(1 / factor)
    if uncertainty.has_unknown_link:  # perhaps backward hides no communication
        slower = max(slower, step.seconds + step.hidden)
    parts = (
        uncertainty.rate,
        UNCHECKED_SPREAD if uncertainty.is_unchecked else 0.0,
        FIXED_SPREAD * num_microbatches * compute.fixed_seconds / step.seconds,
        STRAGGLER_SPREAD * step.stragglers / step.seconds,
    )
    below = math.hypot(*parts, math.log(step.seconds / faster))
    above = math.hypot(*parts, math.log(slower / step.seconds))
    reach = FACTORS[uncertainty.kind]
    return Interval(step.seconds * math.exp(-reach * below), step.seconds * math.exp(reach * above), below, above)


def energy_factors(interval: Interval, kind: str, waiting: float) -> tuple[float, float]:
    """Return the ends of a 90% interval of a step's energy, as multiples of it: power varies beside the time.

    waiting: share of the step in which devices wait.
    """
    below, above = (FACTORS[kind] * math.hypot(spread, POWER_SPREAD) for spread in (interval.below, interval.above))
    return math.exp(-below) * (1 - (1 - IDLE_SHARE) * waiting), math.exp(above)
