"""Locks between processes: the kernel's flock on an open file, released when its process ends, in any way.

The package filelock does not fit: it releases the lock also for children that inherited it, cannot lock a folder, and
falls back to a marker file, which outlives a killed process, on file systems that cannot lock.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file, and create it if needed; closing it releases the lock. Keeps its content; follows no link.

    A child process that inherits the descriptor holds the lock, too: it lasts until both have ended. Raises: OSError.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0)
    except IsADirectoryError as error:
        raise OSError(errno.EISDIR, f"{path} is a folder in the place of a lock file: remove it") from error


def try_lock(file: IO[bytes] | int) -> bool:
    """Lock an open file or folder at once; return False if another process holds it.

    Raises: OSError if its file system cannot lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share_lock(file: IO[bytes] | int) -> None:
    """Wait until no process has the file locked exclusively, then lock it shared. Raises: OSError, like wait_lock."""
    fcntl.flock(file, fcntl.LOCK_SH)


def wait_lock(file: IO[bytes] | int, *, on_wait: Callable[[], object] = lambda: None) -> None:
    """Lock an open file or folder; if another process holds it, call on_wait, then wait for that process.

    Raises: OSError if its file system cannot lock.
    """
    if not try_lock(file):
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)
