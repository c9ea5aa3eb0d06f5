"""Reading from a storage that fails for a while, or never answers.

The worst case, two times the patience and GRACE_SECONDS + CHECK_SECONDS: a read fails until the patience is at its end,
and the last attempt does not return. The config's check of comm.timeout_seconds leaves 2 s for these.
"""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, wait
from threading import Event, Lock
from typing import Any

from bigbatch.trainer.data.loader import Pictures
from bigbatch.trainer.errors import StorageError

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""Between attempts to read; each pause is twice the one before."""
CHECK_SECONDS = 0.5
"""Between two looks at reads that have not returned."""
GRACE_SECONDS = 1.0
"""For reads that get through at the last moment."""
CALM_SECONDS = 60.0
"""Failures that are no further apart belong to one outage."""


class StuckError(StorageError):
    """A read has not returned, and nothing ends the thread that waits for it."""


class Outage:
    """Says on stderr that reading is tried again, once: nobody shall stare at a progress bar that stands still."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._calm_from = 0.0

    def tell(self, text: str) -> None:
        """Print text if it is the first of its outage."""
        with self._lock:
            now = time.monotonic()
            is_new, self._calm_from = now >= self._calm_from, now + CALM_SECONDS
        if is_new:
            print(text, file=sys.stderr, flush=True)


OUTAGE = Outage()
"""Of the process: training and evaluation read from the same storage."""


class PatientReads:
    """The reads of one stream of batches, each in one of num_threads threads."""

    def __init__(self, source: Pictures, *, patience_seconds: float, num_threads: int) -> None:
        """patience_seconds: for so long a read that failed is tried again, and one may take."""
        self._source = source
        self._patience_seconds = patience_seconds
        self._stop = Event()
        self._under_way: list[tuple[int, float] | None] = [None] * num_threads  # position, and since when

    def read(self, position: int, *, thread: int) -> bytes:
        """A picture, tried again while the system refuses it.

        Raises: StorageError, saying for how long it was tried; CancelledError after stop.
        """
        start, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._read_once(position, thread=thread)
            except StorageError as error:
                cause, seconds = error.__cause__, time.monotonic() - start
                if not isinstance(cause, OSError):
                    raise
                left = self._patience_seconds - seconds
                if left <= 0:
                    raise StorageError(f"{error} (tried for {seconds:.1f} s: data.patience_seconds)") from cause
            OUTAGE.tell(
                f"{self._source.name(position)}: cannot be read ({cause.strerror or cause}); trying again for "
                f"{self._patience_seconds:g} s"
            )
            self._stop.wait(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _read_once(self, position: int, *, thread: int) -> bytes:
        if self._stop.is_set():
            raise CancelledError
        self._under_way[thread] = position, time.monotonic()
        try:
            return self._source.read(position)
        finally:
            self._under_way[thread] = None

    def wait_for(self, parts: "Sequence[Future[Any]]") -> None:
        """Wait for threads that read. Raises: StuckError naming a picture, a moment after the patience."""
        while wait(parts, timeout=CHECK_SECONDS).not_done:
            for position, since in filter(None, self._under_way):
                if (seconds := time.monotonic() - since) > self._patience_seconds + GRACE_SECONDS:
                    raise StuckError(
                        f"{self._source.name(position)}: reading it has not returned for {seconds:.1f} s "
                        f"(data.patience_seconds={self._patience_seconds:g}); does its file system still answer?"
                    )

    def stop(self) -> None:
        """Let no further read begin, and end the pauses; safe to call twice and from any thread."""
        self._stop.set()
