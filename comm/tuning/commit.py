"""The commit of the running code."""

import subprocess
from functools import partial
from pathlib import Path

BUILT_FROM = Path(__file__).with_name("built_from.txt")
"""File with the commit in a container image, which is built without git."""


def source_commit() -> str | None:
    """Return the commit of this code's checkout, with '+' if it was changed; in a container image, that of its build.

    None in any other installed wheel.
    """
    here = Path(__file__).resolve()
    git = partial(subprocess.run, cwd=here.parent, input="", capture_output=True, text=True, check=True)
    try:
        git(["git", "ls-files", "--error-unmatch", here.name])  # a wheel in a .venv lies in another project's checkout
        commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        return commit + ("+" if git(["git", "status", "--porcelain", "-uno"]).stdout else "")
    except (OSError, subprocess.CalledProcessError):
        return (BUILT_FROM.read_text().strip() or None) if BUILT_FROM.exists() else None
