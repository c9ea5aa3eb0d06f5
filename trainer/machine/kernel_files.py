"""The kernel's small files, of which any may be missing, refused or odd."""

import math
from pathlib import Path


def read_text(path: Path) -> str:
    """Read a file without the space around it; "" where that cannot be done."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: a path with a NUL in it
        return ""


def read_line(path: Path) -> str:
    """Read the first line, without what cannot be printed."""
    line = next(iter(read_text(path).splitlines()), "")
    return "".join(letter for letter in line[:80] if letter.isprintable())


def read_number(path: Path) -> float | None:
    """Read the number at a file's beginning, as in "100 Gb/sec"; None where there is none, as in "max"."""
    return leading_number(read_text(path))


def leading_number(text: str) -> float | None:
    """Return the number that a text begins with; None where it begins with none, or with one that is not finite."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    is_number = word.isascii() and word.removeprefix("-").replace(".", "", 1).isdigit()
    return float(word) if is_number and math.isfinite(float(word)) else None
