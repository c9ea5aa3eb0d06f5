"""Run a function in a process of its own, within a time limit, and end it with all processes that it started."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

GRACE_SECONDS = 10.0
"""Seconds from the interrupt, at which Python code cleans up, to the kill."""


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
    """On exit, end the process if it lives, and all processes that it started, also in sessions of their own."""
    try:
        yield
    finally:
        assert process.pid is not None
        known = _descendants(process.pid)
        if process.is_alive():
            _signal_group(process.pid, signal.SIGINT)
            process.join(GRACE_SECONDS)
            known += _descendants(process.pid)
        _signal_group(process.pid, signal.SIGKILL)
        process.kill()
        for each in known:
            with suppress(psutil.NoSuchProcess):
                each.kill()  # psutil kills no later process with the same id
        process.join()


def _descendants(pid: int) -> list[psutil.Process]:
    """List the processes that a process started, and those that they started in turn."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
