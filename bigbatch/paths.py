"""Expand a leading ~ and $NAME in the paths of all options and keys; refuse names without a value."""

import os
import re
from argparse import ArgumentTypeError
from pathlib import Path

from bigbatch.errors import ConfigError, UserError

VARIABLE = re.compile(r"\$\w+|\$\{\w+\}", re.ASCII)
UNRESOLVED = re.compile(r"~[^/]*|.*?(\$(?:\w+|\{\w*\}?|\())", re.ASCII | re.DOTALL)
"""Matches a user or a variable without a value here, or a construct that only a shell expands."""


class PathError(ConfigError, ArgumentTypeError):
    """A path names a user or a variable without a value here; argparse shows the message beside its option."""


def expand_path(text: str) -> str:
    """Return a path with a leading ~ or ~user and each $NAME or ${NAME} replaced by their values.

    An existing file of exactly this name is not expanded: a shell's * may have found it. Raises: PathError.
    """
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError
    except ValueError:  # also a character that the file system's encoding lacks
        raise PathError(f"{text}: no path on this system can hold this text; write another") from None
    if not (text.startswith("~") or "$" in text) or os.path.isfile(text):
        return text
    path = VARIABLE.sub(lambda found: os.path.expandvars(found[0]) or found[0], text)
    if path.startswith("~"):
        path = os.path.expanduser(path)
    if found := UNRESOLVED.match(path):
        raise PathError(f"{text}: {found[1] or found[0]} has no value here: set it, or write the path itself")
    return path


def work_folder() -> str:
    """Return the work folder. Raises: UserError if it was deleted."""
    try:
        return os.getcwd()
    except OSError as error:
        raise UserError(f"the work folder was deleted ({error.strerror}): cd to another folder") from error


def as_path(text: str) -> Path:
    """Return expand_path(text) as a Path. Raises: PathError, also for an empty text, which Path reads as '.'."""
    if not text:
        raise PathError("an empty path: a variable behind it may have no value")
    return Path(expand_path(text))
