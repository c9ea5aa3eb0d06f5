"""Shares and counts as people read them."""


def percent(share: float) -> str:
    """Write 0.923 -> '92.3%'."""
    return f"{round(100 * share, 1) + 0.0:.1f}%"  # no -0.0


def count(number: int, thing: str) -> str:
    """Write 2, 'rank' -> '2 ranks'."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
