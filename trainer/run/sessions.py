"""What a launcher has started, found by its sessions.

Open MPI gives ranks process groups of their own, torchrun sessions.
"""

import os
import time
from collections.abc import Set
from contextlib import suppress

import psutil

END_SECONDS = 30.0
"""A process that SIGKILL does not end by then waits for a device or a file system."""


def sessions_under(pid: int) -> set[int]:
    """Return the sessions of this child of ours, which leads one, and of all processes below it."""
    found = {pid}
    with suppress(psutil.NoSuchProcess):  # a signal handler may have taken note of its end just now
        for each in psutil.Process(pid).children(recursive=True):
            with suppress(ProcessLookupError):
                found.add(os.getsid(each.pid))
    return found


def end_sessions(sessions: Set[int], *, grace_seconds: float) -> None:
    """Return when no process is left in them; after grace_seconds end those that are by SIGKILL."""
    start = time.monotonic()
    while left := processes_in(sessions):
        seconds = time.monotonic() - start
        # nothing is left to try: who waits for a device cannot be ended
        if seconds >= grace_seconds + END_SECONDS:
            return
        if seconds >= grace_seconds:
            for each in left:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    each.kill()
        time.sleep(0.05)


def processes_in(sessions: Set[int]) -> list[psutil.Process]:
    """Return the processes of these sessions, but for those whose parent has yet to take note of their end."""
    found = []
    for each in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            # the session first: of a machine's thousand processes, few are ours
            if os.getsid(each.pid) in sessions and each.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                found.append(each)
    return found
