"""What a launcher has started, found by its sessions, as Linux's /proc shows them.

Open MPI gives ranks process groups of their own, torchrun sessions.
"""

import os
import signal
import time
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

END_SECONDS = 30.0
"""A process that SIGKILL does not end by then waits for a device or a file system."""


@dataclass(frozen=True)
class Process:
    """That has not ended."""

    pid: int
    parent: int
    session: int


def sessions_under(pid: int) -> set[int]:
    """Those of this leader of a session, and of all processes below it."""
    processes = list_processes()
    found, sessions = {pid}, {pid}
    while new := [each for each in processes if each.parent in found and each.pid not in found]:
        found |= {each.pid for each in new}
        sessions |= {each.session for each in new}
    return sessions


def end_sessions(sessions: Set[int], *, grace_seconds: float) -> None:
    """Return when no process is left in them; after grace_seconds by SIGKILL."""
    start = time.monotonic()
    while left := [each.pid for each in list_processes() if each.session in sessions]:
        seconds = time.monotonic() - start
        if seconds >= grace_seconds + END_SECONDS:
            return
        if seconds >= grace_seconds:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def list_processes() -> list[Process]:
    """All of this machine, but for those whose parent has yet to take note of their end."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        state, parent, _, session = text.rpartition(")")[2].split()[:4]  # a name may hold blanks and brackets
        if state not in "ZX":
            found.append(Process(int(path.parent.name), int(parent), int(session)))
    return found
