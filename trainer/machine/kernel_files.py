"""Read the kernel's small files; each of them may be missing, refused or malformed."""

import math
from pathlib import Path


def read_text(path: Path) -> str:
    """Return a file's text without surrounding space; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: a path with a NUL in it
        return ""


def read_line(path: Path) -> str:
    """Return the first line without unprintable characters."""
    line = next(iter(read_text(path).splitlines()), "")
    return "".join(letter for letter in line[:80] if letter.isprintable())


def read_number(path: Path) -> float | None:
    """Return the number at a file's start, as in "100 Gb/sec"; None without one, as in "max"."""
    return leading_number(read_text(path))


def leading_number(text: str) -> float | None:
    """Return the number at a text's start; None without one, or if it is not finite."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    is_number = word.isascii() and word.removeprefix("-").replace(".", "", 1).isdigit()
    return float(word) if is_number and math.isfinite(float(word)) else None
