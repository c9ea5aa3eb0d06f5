"""Signals that ask a run to stop, and their handler while a block runs."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Ctrl-C; scancel and preemption; a closed terminal; warnings of schedulers before a time limit (`bigbatch launch`
sends SIGUSR1, too); the limit of CPU time."""


def handled_signals() -> list[signal.Signals]:
    """Return STOP_SIGNALS; without SIGHUP under nohup, where a closed terminal must change nothing."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (is_nohup and number == signal.SIGHUP)]


@contextmanager
def handling_stops(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle handled_signals by the handler within the block. In the main thread only."""
    previous = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
