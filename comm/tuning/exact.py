"""Whole numbers whose sum over ranks has a closed form and no rounding, so that a wrong element can be counted."""

LIMITS = {"float64": 2**53, "float32": 2**24, "float16": 2**11, "bfloat16": 2**8}
"""Up to here every whole number has its own value: 2 to the number of significant bits."""

PERIOD = 1021
"""Elements after which the numbers repeat: a prime, so that a part in another's place is seen."""

LARGEST = 63
"""No single number exceeds this, however many would fit."""


def limit_of(dtype: str) -> int:
    """Say how far a dtype, such as float16, counts without a gap. Raises: KeyError for an unknown one."""
    return LIMITS[dtype]


def rank_pattern(rank: int, world_size: int, *, limit: int) -> list[int]:
    """Return one period of what a rank brings into the sum: of whole numbers whose sum stays within limit.

    Any order of adding is exact, as every partial sum is a whole number within the limit. With more ranks than
    the limit, those beyond bring zeros.
    """
    if rank >= limit:
        return [0] * PERIOD
    largest = min(LARGEST, limit // min(world_size, limit))
    return [(17 * i + 31 * rank + i * rank) % (largest + 1) for i in range(PERIOD)]


def expected_pattern(world_size: int, *, limit: int) -> list[int]:
    """Return one period of the sum over all ranks."""
    patterns = [rank_pattern(rank, world_size, limit=limit) for rank in range(min(world_size, limit))]
    return [sum(column) for column in zip(*patterns, strict=True)]
