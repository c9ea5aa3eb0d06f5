"""Locks between processes: the kernel's flock on an open file, freed when its process ends, in any way.

Not filelock's: it frees a lock for the children that inherited it too, opens no folder, and puts a marker file where a
file system cannot lock, which outlives its process. Each of these matters to a caller here.
"""

import fcntl
import os
from pathlib import Path
from typing import IO


def open_lock(path: Path) -> IO[bytes]:
    """Open the file of a lock, made if needed; close it to free the lock. Keeps its content, and follows no link.

    A child process holds the lock too only if it inherits the descriptor, and then until both have ended.
    Raises: OSError.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0)


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


def wait_lock(file: IO[bytes] | int) -> None:
    """Wait for the lock of an open file or folder, and take it. Raises: OSError if its file system cannot lock."""
    fcntl.flock(file, fcntl.LOCK_EX)
