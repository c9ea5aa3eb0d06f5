"""Text cells of CSV files."""

from bigbatch.errors import printable

FORMULA = ("=", "+", "-", "@")
"""First characters by which a spreadsheet takes a cell for a formula, which may start programs."""


def text_cell(text: str) -> str:
    """Return text as a cell without control characters; one that begins like a formula gets a ' before it."""
    return f"'{printable(text)}" if text.startswith(FORMULA) else printable(text)
