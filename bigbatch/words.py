"""Shares, counts and differences as people read them."""


def percent(share: float) -> str:
    """Write 0.923 -> '92.3%'."""
    return f"{round(100 * share, 1) + 0.0:.1f}%"  # no -0.0


def count(number: int, thing: str) -> str:
    """Write 2, 'rank' -> '2 ranks'; 2, 'class' -> '2 classes'."""
    return f"{number} {thing}{'' if number == 1 else 'es' if thing.endswith(('s', 'batch')) else 's'}"


def first_difference(theirs: str, ours: str) -> str:
    """Return the first lines that differ between two texts, both quoted."""
    pairs = zip(theirs.splitlines(), ours.splitlines(), strict=False)
    differing = (f"{one.strip()!r} against {other.strip()!r}" for one, other in pairs if one != other)
    return next(differing, "one is longer")
