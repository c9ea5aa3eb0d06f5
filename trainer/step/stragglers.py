"""Stragglers: the time that slow ranks cost, and the slowest rank. Pure."""

from collections.abc import Callable, Sequence

LARGE_SHARE = 0.05
"""Share of the step lost to stragglers, above which the slowest rank is named."""


def straggler_share(waited_P: Sequence[float], exposed_P: Sequence[float]) -> float:
    """Return the share of a step that is lost to slower ranks.

    waited_P, exposed_P: shares of the step that each rank waited for images, and for sums. On average a rank waits
    for the wire (as long as the one that comes last), for images (its own, or those of the rank that waits for them
    longest, in its sums) and for stragglers.
    """
    # mean idling, less the wire's part, less the part that images cause
    mean = (sum(waited_P) + sum(exposed_P)) / len(waited_P)
    return max(0.0, mean - min(exposed_P) - max(waited_P))


def straggler_hint(share: float, lags_P: Sequence[float], *, host_of: Callable[[int], str]) -> str | None:
    """Return a line that names the slowest rank, if stragglers cost much.

    lags_P: how long the rank that waited longest for sums waited for each, in any unit.
    """
    if share <= LARGE_SHARE:
        return None
    slowest = max(range(len(lags_P)), key=lambda rank: lags_P[rank])
    return (
        f"steps lose {100 * share:.0f}% of their time to slower ranks, most to rank {slowest} on {host_of(slowest)}: "
        "bigbatch launch preflight compares the nodes"
    )
