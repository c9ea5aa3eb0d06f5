"""Start another Python that imports no library from the work folder."""

import sys

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
"""If set, Python 3.11 and later import nothing from the work folder, where a yaml.py would replace the library."""


def python_argv() -> tuple[str, ...]:
    """Return the command line of this Python; a script that it starts still sees its own folder."""
    return (sys.executable, "-P") if sys.version_info >= (3, 11) else (sys.executable,)


def bigbatch_argv() -> tuple[str, ...]:
    return (*python_argv(), "-m", "bigbatch")
