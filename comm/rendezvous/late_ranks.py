"""Print which ranks the rendezvous waits for, before its time limit ends it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from bigbatch.awake import wait_awake
from bigbatch.errors import tell

WARN_SECONDS = 20.0
"""Default of comm.warn_seconds: when the missing ranks are named for the first time."""


@contextmanager
def reporting_late(seconds: float, describe: Callable[[], str]) -> Iterator[None]:
    """Print describe() on standard error if the block takes longer than seconds; pauses before further lines double.

    describe runs on another thread; nothing is printed if it returns "".
    """
    ended = Event()

    def watch() -> None:
        pause = seconds
        while not wait_awake(ended.wait, pause):  # the time of a suspended job does not count
            with suppress(RuntimeError):  # the store has ended: the wait itself reports that
                if line := describe():
                    tell(line)
            pause *= 2

    watcher = Thread(target=watch, name="bigbatch-late", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(timeout=1.0)
