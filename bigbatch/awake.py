"""A clock that stops while this process is stopped, by Ctrl-Z or because Slurm suspended its job.

A rank that waits by this clock does not count its peers as lost after all of them were stopped together.
"""

import os
from collections.abc import Callable
from threading import Event, RLock, Thread
from time import monotonic

TICK_SECONDS = 1.0
STOPPED_SECONDS = 10.0
"""Least gap between two ticks that counts as a stop of this process; shorter gaps are a busy machine."""


class AwakeClock:
    """Counts the seconds of time.monotonic() without those in which no thread of this process ran.

    A thread ticks; the first call of seconds() after a stop sees the gap and subtracts it.
    """

    def __init__(self, *, stopped: float = 0.0) -> None:
        """stopped: seconds of earlier stops."""
        self._lock = RLock()  # reentrant: a signal handler may ask while another call holds it
        self._seen: float | None = None
        self.stopped = stopped

    def seconds(self) -> float:
        """Return the time by this clock; only differences mean anything."""
        with self._lock:
            now = monotonic()
            if self._seen is None:
                Thread(target=self._tick, name="awake-clock", daemon=True).start()
            elif now - self._seen > STOPPED_SECONDS:
                self.stopped += now - self._seen - TICK_SECONDS
            self._seen = now
            return now - self.stopped

    def _tick(self) -> None:
        never = Event()
        while not never.wait(TICK_SECONDS):
            self.seconds()


_CLOCK = AwakeClock()
os.register_at_fork(after_in_child=lambda: globals().update(_CLOCK=AwakeClock(stopped=_CLOCK.stopped)))
"""A forked process has no ticking thread, and a thread that it lacks may hold the lock."""


def awake_seconds() -> float:
    """Return the time that has passed while this process was not stopped; only differences mean anything."""
    return _CLOCK.seconds()


def wait_awake(wait: Callable[[float], bool], seconds: float) -> bool:
    """Return whether wait(seconds) succeeds within seconds of awake time; it is called again after a stop."""
    deadline = awake_seconds() + seconds
    while not wait(max(0.0, deadline - awake_seconds())):
        if awake_seconds() >= deadline:
            return False
    return True
