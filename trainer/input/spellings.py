"""Two spellings of one class, which folders and tables tell apart and their authors do not."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from bigbatch.errors import DataError

RENAME = "rename one, so that both splits have one spelling of each class"


def spelled_twice(names: Iterable[str]) -> list[str]:
    """Return a line for each class with several spellings in names: by Unicode, width, case, spaces or zeros.

    One letter alone may be a class beside its capital: data sets of handwriting have both on purpose.
    """
    classes = defaultdict(set)
    for name in names:
        classes[_plain(name)].add(name)
    return [_and(sorted(spellings)) for spellings in classes.values() if len(spellings) > 1]


def require_one_spelling(where: Path, names: Sequence[str]) -> None:
    """Raise DataError if names hold two spellings of one class."""
    if twice := spelled_twice(names):
        more = f" (and {len(twice) - 1:,} more such classes)" if len(twice) > 1 else ""
        raise DataError(f"{where}: {twice[0]} are spellings of one class{more}; {RENAME}")


def _plain(name: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", name).split())
    text = text if len(text) == 1 else unicodedata.normalize("NFKC", text.lower())
    number = re.fullmatch(r"0*(\d+)(\.0*)?", text)  # a table that was a spreadsheet has 1.0 for 1
    return number[1] if number else text


def _and(spellings: Sequence[str]) -> str:
    named = " and ".join(map(repr, spellings))
    looks_alike = len({unicodedata.normalize("NFC", each) for each in spellings}) < len(spellings)
    return f"{named} ({' and '.join(map(ascii, spellings))})" if looks_alike else named
