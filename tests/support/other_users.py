"""Run a function as another user of this machine, in a child process: needs root."""

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ALICE, BOB, MALLORY = 41001, 41002, 41003
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


def as_user(uid: int, function: Callable[[], Any], *, umask: int = 0o022) -> Any:
    """Return what function returns, or the text of its error, when it runs as this user.

    The child cannot import what the user may not read: the caller loads modules before.
    """
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.umask(umask)
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            try:
                result: Any = function()
            except BaseException as error:
                result = f"{type(error).__name__}: {error}"
            with os.fdopen(sink, "wb") as pipe:
                pickle.dump(result, pipe)
        finally:
            os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


@contextmanager
def open_folder_of_all() -> Iterator[Path]:
    """Yield a new folder that all users can reach, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="bigbatch-users-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
