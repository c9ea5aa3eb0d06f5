"""Run a function in a process of its own, within a limit, and end it with all that it has started."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

GRACE_SECONDS = 10.0
"""From the interrupt, at which Python code cleans up, to the kill."""


def run_within(action: Callable[[], object], *, seconds: float, log: Path, fork: bool) -> int | None:
    """Return the exit code of the process; None if the limit ended it. An interrupt of the caller ends it, too.

    log: file for its output. fork: begin with this process's imports, which a process that has used a GPU must not.
    """
    context = multiprocessing.get_context("fork" if fork else "spawn")
    process = context.Process(target=_live, args=(action, log))  # type: ignore[attr-defined]
    process.start()
    with _ended(process):
        process.join(seconds)
        if process.is_alive():
            return None
    return int(process.exitcode)


def _live(action: Callable[[], object], log: Path) -> None:
    os.setsid()  # a group of its own: the terminal's Ctrl-C goes to the caller alone
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, signal.default_int_handler)
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    action()


def _end_with_caller() -> None:
    """Kill this process's group once the caller was killed, to free the GPU."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os.killpg(0, signal.SIGKILL)


@contextmanager
def _ended(process: BaseProcess) -> Iterator[None]:
    """End the process afterwards, if it lives, and all that it has started, also in sessions of their own."""
    try:
        yield
    finally:
        assert process.pid is not None
        known = _open_all(descendants(process.pid))
        if process.is_alive():
            _signal_group(process.pid, signal.SIGINT)
            process.join(GRACE_SECONDS)
            known += _open_all(descendants(process.pid))
        _signal_group(process.pid, signal.SIGKILL)
        process.kill()
        for each in known:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(each, signal.SIGKILL)
            os.close(each)
        process.join()


def descendants(pid: int) -> list[int]:
    """List the processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def _open_all(pids: list[int]) -> list[int]:
    """Open a descriptor of each process, which no later process of that number shares."""
    found = []
    for pid in pids:
        with suppress(ProcessLookupError):
            found.append(os.pidfd_open(pid))
    return found


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
