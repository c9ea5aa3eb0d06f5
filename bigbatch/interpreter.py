"""How a process of ours starts another Python that takes no library from the folder in which somebody works."""

import sys

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
"""Python 3.11 and later then leave out the work folder, in which a yaml.py would be run in place of the library."""


def python_argv() -> tuple[str, ...]:
    """Return the words of this Python; an own script that it starts in turn sees its own folder as ever."""
    return (sys.executable, "-P") if sys.version_info >= (3, 11) else (sys.executable,)


def bigbatch_argv() -> tuple[str, ...]:
    """Return the words of the bigbatch command."""
    return (*python_argv(), "-m", "bigbatch")
