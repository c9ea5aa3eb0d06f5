"""Locks between processes: the kernel's flock on an open file, freed with the process that holds it, however it ends.

Not filelock's: it frees a lock for the children that inherited it too, opens no folder, and puts a marker file where a
file system cannot lock, which outlives its process. Our callers each need one of these.
"""

import fcntl
import os
from pathlib import Path
from typing import IO


def open_lock(path: Path) -> IO[bytes]:
    """Open the file of a lock, made if needed; close it to free the lock. Its content stays, and no link is followed.

    A child process holds the lock with us only where the descriptor is passed to it, and then until both ended.
    Raises: OSError.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0)


def try_lock(file: IO[bytes] | int) -> bool:
    """Lock an open file or folder at once; return False where another process holds it.

    Raises: OSError where its file system cannot lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share_lock(file: IO[bytes] | int) -> None:
    """Lock an open file with others that do so, when nobody has it alone. Raises: OSError, as wait_lock does."""
    fcntl.flock(file, fcntl.LOCK_SH)


def wait_lock(file: IO[bytes] | int) -> None:
    """Lock an open file or folder when whoever holds it lets go. Raises: OSError where its file system cannot lock."""
    fcntl.flock(file, fcntl.LOCK_EX)
