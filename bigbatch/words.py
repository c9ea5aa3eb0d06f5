"""Shares, counts, ranks and differences as people read them."""

from collections.abc import Sequence

MAX_NAMED = 8
"""Most ranks that one line names."""


def percent(share: float) -> str:
    """Write 0.923 -> '92.3%'."""
    return f"{round(100 * share, 1) + 0.0:.1f}%"  # no -0.0


def count(number: int, thing: str) -> str:
    """Write 2, 'rank' -> '2 ranks'; 2, 'class' -> '2 classes'."""
    return f"{number} {thing}{'' if number == 1 else 'es' if thing.endswith(('s', 'batch')) else 's'}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 3, 4, 5", or the first MAX_NAMED of many; "" for none."""
    if not ranks:
        return ""
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MAX_NAMED]))}{more}"


def first_difference(theirs: str, ours: str) -> str:
    """Return the first lines that differ between two texts, both quoted."""
    pairs = zip(theirs.splitlines(), ours.splitlines(), strict=False)
    differing = (f"{one.strip()!r} against {other.strip()!r}" for one, other in pairs if one != other)
    return next(differing, "one is longer")
