"""Signals that ask a run to stop: noted at once, acted on by all ranks together."""

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; scancel and preemption; the warning before a time limit, and what `bigbatch launch` sends."""


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
        """This rank was asked to stop."""
        return self.signal_name is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
