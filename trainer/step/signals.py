"""Signals that ask a run to stop: noted at once, acted on by all ranks together."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; scancel and preemption; the warning before a time limit, and what `bigbatch launch` sends."""


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Send these signals to the handler meanwhile. In the main thread only."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


class StopRequest:
    """Remembers the first stop signal; a second Ctrl-C interrupts at once.

    Constructed in the main thread only.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    @property
    def is_set(self) -> bool:
        """Tell whether this rank was asked to stop."""
        return self.signal_name is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
