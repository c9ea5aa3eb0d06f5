"""Find reasons to doubt an efficiency; a doubted one is not stated as a result. Pure."""

from collections.abc import Callable
from statistics import median, quantiles

from bigbatch.launch.efficiency import Efficiency, MeasuredPoint
from bigbatch.words import count, percent

ENOUGH_REPORTS = 3
"""Least reports of a point; fewer have no spread that would show a disturbance."""
STEADY = 0.2
"""Largest distance between the quartiles of a point's rates, as a share of their median."""
PERFECT = 1.05
"""Highest credible efficiency: ranks with the same share are not faster together, except for measurement noise."""


def doubts(each: Efficiency) -> list[str]:
    """Return the reasons; empty if the efficiency can be stated, and for the base, which is compared with itself."""
    point, base = each.point, each.base
    if point == base:
        return []
    found = []
    fewest, restless = min(point, base, key=lambda one: len(one.rates)), max(point, base, key=_spread)
    if len(fewest.rates) < ENOUGH_REPORTS:
        has = f"{count(fewest.ranks, 'rank')}: {count(len(fewest.rates), 'report')}, not {ENOUGH_REPORTS} or more"
        found.append(f"too few reports ({has})")
    if point.device != base.device:
        has = f"{count(base.ranks, 'rank')}: {base.device}, {count(point.ranks, 'rank')}: {point.device}"
        found.append(f"other devices or threads per rank ({has})")
    if _spread(restless) > STEADY:
        has = f"{count(restless.ranks, 'rank')}: half of the reports lie {percent(_spread(restless))} apart"
        found.append(f"a busy machine ({has})")
    if each.efficiency > PERFECT and not found:
        has = f"busy at {count(base.ranks, 'rank')}, or smaller local batches that fit into caches"
        found.append(f"more than perfect (the machine was {has})")
    return found


def advice(each: Efficiency, *, again: Callable[[MeasuredPoint], str]) -> str:
    """Return what settles an efficiency that is in doubt; again: the command that measures a point again."""
    point, base = each.point, each.base
    if min(len(point.rates), len(base.rates)) < ENOUGH_REPORTS:
        return "take more steps, or fewer between reports (run.log_every_steps)"
    if point.device != base.device:
        return "state compute.cpu_threads in options, or take the same devices"
    restless = max(point, base, key=_spread)
    repeated = restless if _spread(restless) > STEADY else base
    return f"measure {count(repeated.ranks, 'rank')} again: {again(repeated)}"


def _spread(point: MeasuredPoint) -> float:
    """Return the distance of the quartiles of its rates over their median; 0 for one rate."""
    if len(point.rates) < 2:
        return 0.0
    low, _, high = quantiles(point.rates, n=4, method="inclusive")
    return (high - low) / median(point.rates)
