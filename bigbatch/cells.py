"""Text cells of CSV files."""

import re

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
