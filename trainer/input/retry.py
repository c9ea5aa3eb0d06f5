"""Read from storage that fails for a while, is slow, or never answers.

Reading delays a batch by at most 2 * patience + GRACE_SECONDS + CHECK_SECONDS. An image takes that long if its reads
fail until the patience ends, and its last read does not return; many images that fail in turn may not take longer.
The config's check of comm.timeout_seconds leaves 2 s for the two constants.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event, Lock, get_ident
from typing import Any, TypeVar

from bigbatch.awake import awake_seconds
from bigbatch.errors import StorageError, print_line
from bigbatch.trainer.input.base import ImageSource

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""First and longest pause between attempts to read; each pause is twice the one before."""
CHECK_SECONDS = 0.5
"""Seconds between two checks of reads that have not returned."""
GRACE_SECONDS = 1.0
"""Additional seconds for reads that succeed at the last moment."""
OUTAGE_GAP_SECONDS = 60.0
"""Failures less than this many seconds apart belong to one outage."""

T = TypeVar("T")


class StuckError(StorageError):
    """Reads did not return and were abandoned; their threads cannot be ended."""


class Outage:
    """Prints on stderr, once per outage, that reads are retried, so that a stalled progress bar is explained."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._calm_from = 0.0

    def tell(self, text: str) -> None:
        """Print text, unless one was printed in the same outage."""
        with self._lock:
            now = awake_seconds()
            is_new, self._calm_from = now >= self._calm_from, now + OUTAGE_GAP_SECONDS
        if is_new:
            print_line(text, file=sys.stderr)


OUTAGE = Outage()
"""One for the process: training and evaluation read from the same storage."""


class BatchWait:
    """Read time of the batch that the step waits for; shared by all reads during that wait."""

    def __init__(self) -> None:
        self.read_seconds = 0.0
        """Seconds of reads during the wait, for this batch and for batches ahead of it."""


class PatientReads:
    """Runs the reads of one stream of batches in threads."""

    def __init__(
        self, source: ImageSource, *, patience_seconds: float, awaited: Callable[[], BatchWait | None] = lambda: None
    ) -> None:
        """Start no thread yet. A failed read is tried again for patience_seconds; one attempt may take that long plus
        GRACE_SECONDS.

        awaited: returns the BatchWait, or None; reads may delay it by twice the patience.
        """
        self._source = source
        self._patience_seconds = patience_seconds
        self._awaited = awaited
        self._stop = Event()
        self._threads: ThreadPoolExecutor | None = None
        self._num_threads = 0  # of the pool
        self._under_way: dict[int, tuple[int, float] | None] = {}  # by thread: position, and since when
        self.latencies: list[float] = []
        """Seconds of each successful read since the caller cleared them."""

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Context in which gather may be called. Its threads end on exit, except those that StuckError abandons."""
        is_stuck = False
        try:
            yield
        except StuckError:
            is_stuck = True
            raise
        finally:
            self.stop()
            if self._threads is not None:
                # nothing ends a thread that waits for a file system
                self._threads.shutdown(wait=not is_stuck, cancel_futures=True)

    def gather(self, asked: Sequence[int], take: Callable[[int], T], *, num_threads: int) -> list[T]:
        """Return take(row) for each row of the positions asked, called in num_threads threads, in the order of rows.

        Raises: what take raises; StuckError naming the image if a read takes too long or reads are too slow together;
        StuckError if a read has not returned GRACE_SECONDS after stop.
        """
        found: list[Any] = [None] * len(asked)
        # all threads share one iterator, so a slow read delays no other; one task per thread, since a task costs as
        # much as reading a cached file
        rows = iter(range(len(asked)))

        def take_some() -> None:
            for row in rows:
                found[row] = take(row)

        threads = self._pool_of(num_threads)
        parts = [threads.submit(take_some) for _ in range(min(num_threads, len(asked)))]
        self._wait_for(parts, asked, found)
        for part in parts:
            part.result()
        return found

    def _pool_of(self, num_threads: int) -> ThreadPoolExecutor:
        """Return a pool of at least num_threads; a larger pool replaces the former one, which cannot grow."""
        if self._threads is None or num_threads > self._num_threads:
            if self._threads is not None:
                self._threads.shutdown()
            self._num_threads = num_threads
            self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="bigbatch-read")
        return self._threads

    def read(self, position: int) -> bytes:
        """Read an image, called in one of the threads; try again for patience_seconds after an error of the system.

        Raises: StorageError that says how long it was tried; CancelledError after stop.
        """
        start, pause, thread = awake_seconds(), FIRST_PAUSE_SECONDS, get_ident()
        while True:
            if self._stop.is_set():
                raise CancelledError
            since = awake_seconds()
            self._under_way[thread] = position, since
            try:
                data = self._source.read(position)
                self.latencies.append(awake_seconds() - since)
                return data
            except StorageError as error:
                # only errors of the system may be temporary; a cut or edited shard stays wrong
                cause, seconds = error.__cause__, awake_seconds() - start
                if not isinstance(cause, OSError):
                    raise
                left = self._patience_seconds - seconds
                if left <= 0:
                    raise StorageError(f"{error} (tried for {seconds:.1f} s: data.patience_seconds)") from cause
            finally:
                self._under_way[thread] = None
            OUTAGE.tell(
                f"{self._source.name(position)}: cannot be read ({cause.strerror or cause}); trying again for "
                f"{self._patience_seconds:g} s"
            )
            # a sleep that stop() ends
            self._stop.wait(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _wait_for(self, parts: Sequence[Future[None]], asked: Sequence[int], found: Sequence[object]) -> None:
        """Wait for the tasks, and check their progress. found: images read at the positions asked, None until then."""
        is_done, last = False, awake_seconds()
        while not is_done:
            is_done = not wait(parts, timeout=CHECK_SECONDS).not_done
            awaited, before, last = self._awaited(), last, awake_seconds()
            if awaited is not None:
                awaited.read_seconds += last - before
            if not is_done and self._stop.is_set():
                # a last wait: nearly always all reads return in it, so that no thread is abandoned
                is_done = not wait(parts, timeout=GRACE_SECONDS).not_done
                if not is_done:
                    raise StuckError("reading was stopped while a read had not returned")
            elif not is_done:
                self._require_answer()
                self._require_pace(awaited, asked, found)

    def _require_answer(self) -> None:
        for position, since in filter(None, tuple(self._under_way.values())):
            if (seconds := awake_seconds() - since) > self._patience_seconds + GRACE_SECONDS:
                raise StuckError(
                    f"{self._source.name(position)}: reading it has not returned for {seconds:.1f} s "
                    f"(data.patience_seconds={self._patience_seconds:g}); check whether its file system answers"
                )

    def _require_pace(self, awaited: BatchWait | None, asked: Sequence[int], found: Sequence[object]) -> None:
        if awaited is None or awaited.read_seconds <= 2 * self._patience_seconds + GRACE_SECONDS:
            return
        # the first missing image is being read, since the threads take the positions in order
        missing = [position for position, image in zip(asked, found, strict=True) if image is None]
        if missing:
            raise StuckError(
                f"{self._source.name(missing[0])}: storage too slow: {len(asked) - len(missing)} of {len(asked)} "
                f"images after {awaited.read_seconds:.1f} s; a batch may take twice data.patience_seconds="
                f"{self._patience_seconds:g}: raise that, or lower batch.microbatch_size"
            )

    def stop(self) -> None:
        """Start no further read, and end the pauses; safe to call twice and from any thread."""
        self._stop.set()
