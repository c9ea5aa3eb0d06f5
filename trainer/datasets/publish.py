"""Publish a copy that the users of a node share: it is made in a hidden folder, which is renamed when it is whole.

A published copy that needs repair stays until the new one replaces it.
"""

import os
import shutil
from pathlib import Path

from bigbatch.files import is_own_file, mode_of_own
from bigbatch.trainer.datasets.pack import UNFINISHED
from bigbatch.trainer.input.data_root import INDEX, STAGED

SHARED_FOLDER, SHARED_FILE = 0o755, 0o644
OLD = ".old"
"""Folder in a new copy for the published one that it replaces, until that is deleted."""


def hidden_folder(public: Path) -> Path:
    """Return the path of the folder in which this user makes the copy public."""
    return public.with_name(f".{public.name}.{os.geteuid()}{UNFINISHED}")


def begun_folder(public: Path) -> Path:
    """Return the hidden folder, or public if only there a copy is unfinished, or one by other means."""
    is_published = (public / INDEX).exists() and (public / STAGED).exists()
    hidden = hidden_folder(public)
    return public if public.exists() and not is_published and not hidden.exists() else hidden


def hide(begun: Path, public: Path) -> Path:
    """Close the begun folder of public, which exists, to other users; return its hidden path. Raises: OSError."""
    hidden = hidden_folder(public)
    begun.rename(hidden)
    hidden.chmod(0o700)
    return hidden


def publish(folder: Path, public: Path) -> None:
    """Let all users read a copy, but only this one write it; then give it the name public. Skip another user's.

    Raises: OSError.
    """
    if mode_of_own(folder) is None:
        return
    shutil.rmtree(folder / OLD, ignore_errors=True)
    for path in folder.iterdir():
        if is_own_file(path):
            path.chmod(SHARED_FILE)
        else:  # a link, or a file that another user can change
            path.unlink()
    folder.chmod(SHARED_FOLDER)
    if folder != public:
        if public.exists() and mode_of_own(public) is not None:
            public.rename(folder / OLD)
        folder.rename(public)
        shutil.rmtree(public / OLD, ignore_errors=True)
