"""A clock that stands still while this process is stopped, as Slurm's suspended jobs and Ctrl-Z stop it.

Whoever waits for others by it does not take them for lost because all of them were stopped together.
"""

import os
from collections.abc import Callable
from threading import Event, RLock, Thread
from time import monotonic

TICK_SECONDS = 1.0
STOPPED_SECONDS = 10.0
"""A gap between two ticks from which on this process was stopped; shorter ones are a busy machine, and count."""


class AwakeClock:
    """Counts the seconds of time.monotonic() but for those during which no thread of this process ran.

    A thread of its own ticks; whoever asks first after a stop sees the gap, and takes it out.
    """

    def __init__(self, *, stopped: float = 0.0) -> None:
        """stopped: the seconds of stops before."""
        self._lock = RLock()  # a signal handler may ask in the midst of another question
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
"""A forked process has no thread that ticks, and the lock may be held by one that it does not have."""


def awake_seconds() -> float:
    """Return the time that has gone while this process was not stopped; only differences mean anything."""
    return _CLOCK.seconds()


def wait_awake(wait: Callable[[float], bool], seconds: float) -> bool:
    """Call wait(seconds), which tells whether it came to its end, again for what a stop has taken of its time."""
    deadline = awake_seconds() + seconds
    while not wait(max(0.0, deadline - awake_seconds())):
        if awake_seconds() >= deadline:
            return False
    return True
