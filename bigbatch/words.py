"""Shares, counts, ranks and differences as people read them; numbers as they write them."""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

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
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks, most=MAX_NAMED)}" if ranks else ""


def listed(things: Sequence[object], *, most: int = 4) -> str:
    """Return the first things as text, with the number of the others."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + more


def first_difference(theirs: str, ours: str) -> str:
    """Return the first lines that differ between two texts, both quoted."""
    pairs = zip(theirs.splitlines(), ours.splitlines(), strict=False)
    differing = (f"{one.strip()!r} against {other.strip()!r}" for one, other in pairs if one != other)
    return next(differing, "one is longer")


# Numbers in options and files: decimal, in ASCII. int() would also accept 1_0 for 10.
WHOLE = r"[-+]?(0|[1-9][0-9]*)"
DECIMAL = rf"({WHOLE}(\.[0-9]*)?|[-+]?\.[0-9]+)([eE][-+]?[0-9]+)?"


class NumberError(ArgumentTypeError, ValueError):
    """A word is not a number of the expected kind; argparse shows the message beside its option."""


def whole(text: str) -> int:
    """Parse an int. Raises: NumberError, also for 010, 1_0 and digits of other scripts."""
    if not re.fullmatch(WHOLE, text):
        raise NumberError(f"invalid int value: {text!r}")
    return int(text)


def decimal(text: str) -> float:
    """Parse a float; inf and nan are accepted. Raises: NumberError, like whole."""
    if not re.fullmatch(rf"{DECIMAL}|[-+]?inf|nan", text):
        raise NumberError(f"invalid float value: {text!r}")
    return float(text)


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for argparse: an int of at least this."""

    def parse(text: str) -> int:
        if (number := whole(text)) < least:
            raise NumberError(f"{text} is too small: give at least {least}")
        return number

    return parse


def positive(text: str) -> float:
    """Parse a positive, finite float. Raises: NumberError."""
    if not 0 < (number := decimal(text)) < float("inf"):
        raise NumberError(f"{text} must be a positive number")
    return number


def spans(numbers: Iterable[int], *, between: str = ", ") -> str:
    """Write sorted numbers as ranges, such as 0-3, 7."""
    # within a run of neighbours, number minus position stays the same
    runs = [[each for _, each in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return between.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def is_number(value: object) -> bool:
    """Check that a value read from a file is a finite number that a float holds exactly enough; False for a bool."""
    return type(value) in (int, float) and abs(value) < 1e15  # type: ignore[arg-type]


def has_numbers(record: Mapping[str, object], *names: str) -> bool:
    """Return whether a record, perhaps damaged or of another release, has a number (is_number) under each name."""
    return all(is_number(record.get(name)) for name in names)
