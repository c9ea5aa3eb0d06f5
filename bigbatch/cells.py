"""Cells of text tables: in columns on the terminal, and in CSV files."""

import re
from collections.abc import Container, Sequence

from bigbatch.errors import printable
from bigbatch.words import DECIMAL

FORMULA = ("=", "+", "-", "@")
"""First characters by which a spreadsheet takes a cell for a formula, which may start programs."""


def text_cell(text: str) -> str:
    """Return text as a cell without control characters; one that begins like a formula gets a ' before it.

    A number, perhaps with %, is no formula.
    """
    is_formula = text.startswith(FORMULA) and not re.fullmatch(rf"{DECIMAL}( ?%)?", text)
    return f"'{printable(text)}" if is_formula else printable(text)


def columns(rows: Sequence[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """Return rows as lines, in columns as wide as their longest cell; right: positions of right-aligned columns."""
    aligned = []
    for at, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        aligned.append([cell.rjust(width) if at in right else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
