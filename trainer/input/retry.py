"""Read from storage that fails for a while, is slow, or never answers.

Reading delays a batch by at most 2 * patience + GRACE_SECONDS + CHECK_SECONDS. One image takes that long if its reads
fail for the patience, and its last read then hangs. The limit is for all images of a batch together.
The config's check of comm.timeout_seconds leaves 2 s for the two constants.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Lock, Thread, get_ident
from typing import Any, Generic, TypeVar

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
    """Seconds of reads while the step waits for one batch; the consumer makes one for each wait."""

    read_seconds = 0.0
    """Includes later batches that the decoder reads before it hands out this one."""


class PendingBatch(Generic[T]):
    """A batch whose rows threads read in order; after an error they begin no further row."""

    def __init__(self, asked: Sequence[int], read_row: Callable[[int], T]) -> None:
        self.asked = asked
        """Position of each row's image."""
        self.found: list[T | None] = [None] * len(asked)
        self.result: Future[list[T | None]] = Future()
        """What read_row returned for each row, or the error of the first row that has one."""
        self._read_row = read_row
        self._errors: dict[int, BaseException] = {}
        self._numbers = list(range(len(asked)))
        if not asked:
            self.result.set_result([])

    def read_row(self, row: int) -> None:
        """Read one row; from any thread."""
        if not self._errors:
            try:
                self.found[row] = self._read_row(row)
            except BaseException as error:
                self._errors[row] = error
        if self._numbers.pop() == 0:  # without a lock: each row pops another number, and the last row pops 0
            if self._errors:
                self.result.set_exception(self._errors[min(self._errors)])
                self.found = []  # the error's traceback keeps this object in memory
            else:
                self.result.set_result(self.found)


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
        self._threads: list[Thread] = []
        self.num_threads = 0
        """Threads that take rows; other threads may still end their last ones."""
        self._rows: SimpleQueue[tuple[PendingBatch[Any], int] | None] = SimpleQueue()
        """Rows that no thread has begun; None ends a thread."""
        self._batches: dict[int, int] = {}  # id of the last PendingBatch, by thread
        self._under_way: dict[int, tuple[int, float] | None] = {}  # by thread: position, and since when
        self.latencies: list[float] = []
        """Seconds of each successful read since the caller cleared them."""

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Context in which begin and finish may be called. The exit waits for the threads, except after an error.

        Nothing ends a thread that hangs in a file system, but it does not keep the process alive.
        """
        has_failed = True
        try:
            yield
            has_failed = False
        except (GeneratorExit, CancelledError):
            has_failed = False
            raise
        except StuckError:
            self._threads.clear()
            raise
        finally:
            self.stop()
            self.use_threads(0)
            if not has_failed:
                self.join()

    def join(self) -> None:
        """Wait for threads that end, GRACE_SECONDS at most; not for those that StuckError has abandoned."""
        deadline = time.monotonic() + GRACE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def use_threads(self, number: int) -> None:
        """Read with this many threads, or with fewer if the system allows no more.

        Additional threads start at once; surplus ones end after the rows that are queued now.
        Raises: RuntimeError if not one can start.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while self.num_threads < number:
            thread = Thread(target=self._take_rows, name="bigbatch-read", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self.num_threads:
                    raise
                break
            self._threads.append(thread)
            self.num_threads += 1
        while self.num_threads > number:
            self._rows.put(None)
            self.num_threads -= 1

    def begin(self, asked: Sequence[int], read_row: Callable[[int], T]) -> PendingBatch[T]:
        """Queue read_row(row) for each row of the positions asked, after the rows that were queued before."""
        pending = PendingBatch(asked, read_row)
        for row in range(len(asked)):
            self._rows.put((pending, row))
        return pending

    def finish(self, pending: PendingBatch[T]) -> list[T]:
        """Return what read_row returned for each row.

        Raises: what read_row raises; StuckError naming the image if a read or all reads together are too slow;
        StuckError if a read has not returned GRACE_SECONDS after stop.
        """
        since = awake_seconds()
        while wait([pending.result], timeout=CHECK_SECONDS).not_done:
            since = self._note_wait(since)
            self._require_progress(pending)
        self._note_wait(since)
        return pending.result.result()  # type: ignore[return-value]

    def _take_rows(self) -> None:
        # after the last row of a batch a thread continues to the next batch: it waits for no slower thread
        while (task := self._rows.get()) is not None:
            pending, row = task
            self._batches[get_ident()] = id(pending)
            pending.read_row(row)
            del task, pending  # while the thread waits, it must not keep a batch in memory

    def read(self, position: int) -> bytes:
        """Read an image, called in one of the threads; try again for patience_seconds after an error of the system.

        Raises: StorageError that says how long it was tried; CancelledError after stop.
        """
        start, pause, thread = awake_seconds(), FIRST_PAUSE_SECONDS, get_ident()
        while not self._stop.is_set():
            since = awake_seconds()
            self._under_way[thread] = position, since
            try:
                data = self._source.read(position)
                self.latencies.append(awake_seconds() - since)
                return data
            except StorageError as error:
                left = self._seconds_left(error, position, start=start)
            finally:
                self._under_way[thread] = None
            # a sleep that stop() ends
            self._stop.wait(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise CancelledError

    def _seconds_left(self, error: StorageError, position: int, *, start: float) -> float:
        """Return how long to try again, and tell it. Raises: the error, if it is to stay; CancelledError."""
        # only errors of the system may be temporary; a cut or edited shard stays wrong
        cause, seconds = error.__cause__, awake_seconds() - start
        if not isinstance(cause, OSError):
            raise error
        if self._stop.is_set():  # the source may be closed already
            raise CancelledError from None
        left = self._patience_seconds - seconds
        if left <= 0:
            raise StorageError(f"{error} (tried for {seconds:.1f} s: data.patience_seconds)") from cause
        OUTAGE.tell(
            f"{self._source.name(position)}: cannot be read ({cause.strerror or cause}); trying again for "
            f"{self._patience_seconds:g} s"
        )
        return left

    def _note_wait(self, since: float) -> float:
        """Add the time since then to the wait of the consumer, if it waits; return the time."""
        now, awaited = awake_seconds(), self._awaited()
        if awaited is not None:
            awaited.read_seconds += now - since
        return now

    def _require_progress(self, pending: PendingBatch[Any]) -> None:
        if self._stop.is_set():
            # a last wait: nearly always all reads return in it, so that no thread is abandoned
            if wait([pending.result], timeout=GRACE_SECONDS).not_done:
                raise StuckError("reading was stopped while a read had not returned")
            return
        self._require_answer(pending)
        self._require_pace(self._awaited(), pending)

    def _require_answer(self, pending: PendingBatch[Any]) -> None:
        for thread, read in tuple(self._under_way.items()):
            # a read of the next batch is reported in its place
            if read is None or self._batches.get(thread) != id(pending):
                continue
            position, since = read
            if (seconds := awake_seconds() - since) > self._patience_seconds + GRACE_SECONDS:
                raise StuckError(
                    f"{self._source.name(position)}: a read has not returned for {seconds:.1f} s "
                    f"(data.patience_seconds={self._patience_seconds:g}); check whether its file system answers"
                )

    def _require_pace(self, awaited: BatchWait | None, pending: PendingBatch[Any]) -> None:
        if awaited is None or awaited.read_seconds <= 2 * self._patience_seconds + GRACE_SECONDS:
            return
        asked = pending.asked
        # the first missing image is being read, since the threads take the positions in order
        missing = [position for position, image in zip(asked, pending.found, strict=False) if image is None]
        if missing:
            raise StuckError(
                f"{self._source.name(missing[0])}: storage is too slow: {len(asked) - len(missing)} of {len(asked)} "
                f"images are read after the step has waited {awaited.read_seconds:.1f} s. The limit is twice "
                f"data.patience_seconds={self._patience_seconds:g}, plus {GRACE_SECONDS:g} s. Raise it, or lower "
                "batch.microbatch_size"
            )

    def stop(self) -> None:
        """Start no further read, and end the pauses; safe to call twice and from any thread."""
        self._stop.set()
