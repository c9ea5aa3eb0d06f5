"""The root of all errors whose one-line message is for the user, not for a developer; what they suggest."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something a user can mend; the message names the thing and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like a misspelt one, for its message; empty where none is known."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)), "")
