"""Watch this rank's operations, and print which ranks are late before the time limit ends the job."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous import limits
from bigbatch.comm.rendezvous.control import Pending
from bigbatch.comm.rendezvous.failures import Stall
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import LOST, tell
from bigbatch.parts import load

if TYPE_CHECKING:
    from bigbatch.comm.rendezvous.hang_report import HangReport

FIRST_UNQUEUED_NUMBER = -1_000_000
"""Number of the first operation outside of a queue; such numbers stay below those of a queue."""


class Watch:
    """Follows the failure detector's log on its own thread, and prints which ranks are late for an operation.

    A rank that has waited warn_seconds in an operation says so in the log. The other ranks that wait in the same one
    then say so, too; a rank that does not is late. Each waiting rank names the late ones, and a late rank that still
    runs prints that others wait for it.
    ends_job: also end this process after the control's timeout. For transports that only enqueue (NCCL), where no
    thread of ours waits. A second thread then watches the clock without the store, so a store that is lost or hangs
    delays the end only by the time of the verdict. After a rank is lost this process ends earlier. Before the end
    the flight recorder is written to a file, and the ranks' collectives are compared. If the job heals, the
    waiting thread gets time to abort first.
    """

    def __init__(
        self,
        control: JobControl,
        oldest: Callable[[], Pending | None] = lambda: None,
        *,
        ends_job: bool = False,
        say: Callable[[str], None] = tell,
    ) -> None:
        self._control, self._oldest = control, oldest
        self._detector, self._log = control.detector, control.detector.log
        self._warn_seconds, self._say = control.warn_seconds, say
        # four checks per warn_seconds: answers of others are read at most a quarter of it late
        self._look_seconds = min(limits.LOOK_SECONDS, control.warn_seconds / 4)
        self._unqueued_numbers = itertools.count(FIRST_UNQUEUED_NUMBER)
        self._logged_wait: Pending | None = None
        """The last operation in which this rank has said that it waits, at _logged_at."""
        self._logged_at = 0.0
        self._reported: set[int] = set()
        self._late_texts: dict[int, str] = {}
        """Operation number -> the printed line about its late ranks, for the time after the store is lost."""
        self._report: HangReport | None = (
            load("bigbatch.comm.rendezvous.hang_report.HangReport")(control) if ends_job else None
        )
        abort_seconds = 2 * limits.VERDICT_SECONDS if self._detector.heals else 0.0
        self._end_seconds = control.timeout_seconds + abort_seconds
        self._lost_at: float | None = None
        self._closed = Event()
        rounds = [self._follow_log, self._watch_clock] if ends_job else [self._follow_log]
        self._threads = [Thread(target=each, name="bigbatch-watch", daemon=True) for each in rounds]
        self._detector.is_watched = True
        for thread in self._threads:
            thread.start()

    @property
    def _here(self) -> str:
        return f"rank {self._control.rank} on {self._control.host}"

    @contextmanager
    def during(self, label: str) -> Iterator[None]:
        """Watch the block as an operation of all ranks. Operations of the queue, if there is one, take precedence.

        All ranks make these calls in the same order.
        """
        queued, pending = self._oldest, Pending(next(self._unqueued_numbers), label, awake_seconds())
        self.follow(lambda: queued() or pending)
        try:
            yield
        finally:
            self.follow(queued)

    def follow(self, oldest: Callable[[], Pending | None]) -> None:
        """From now on watch the queue whose oldest operation this function returns; numbers start at 1."""
        self._oldest = oldest

    def close(self) -> None:
        self._closed.set()
        self._detector.is_watched = False
        with suppress(RuntimeError):
            self._log.wake()
        for thread in self._threads:
            # one may wait for a store that does not answer any more
            thread.join(timeout=limits.LOOK_SECONDS)

    def _follow_log(self) -> None:
        store, size = self._control.store, self._control.world_size
        pause = size / limits.MAX_LOOKS_PER_SECOND if store.can_wait else self._look_seconds
        while not self._closed.wait(pause):
            try:
                self.look(wait=self._look_seconds)
                self._detector.has_lost_store = False
            except RuntimeError:  # the store is lost, or closed at the end of a good run
                self._detector.has_lost_store = True
                self._report_silent_store()
                self._closed.wait(self._look_seconds)

    def _watch_clock(self) -> None:
        while not self._closed.wait(self._look_seconds):
            self.check_clock()

    def check_clock(self) -> None:
        """Check the clock once; end this process after the time limit or a rank failure. Does not need the store."""
        pending = self._oldest()
        if pending is None:
            return
        cause = "" if self._detector.heals else self._detector.why_hopeless()
        if cause and self._lost_at is None:
            self._lost_at = awake_seconds()
            ends = f"this process ends in {limits.LEAVE_SECONDS:g} s"
            self._say(f"{self._here} waits in {pending.label}, and {cause}: {ends}")
        has_left = self._lost_at is not None and awake_seconds() - self._lost_at > limits.LEAVE_SECONDS
        if has_left or pending.seconds > self._end_seconds:
            seen = self._late_texts.get(pending.number, "")
            assert self._report is not None, "only of a watch that ends the job"
            self._report.say(pending.label, pending.seconds, seen, cause=cause if has_left else "", by=self._say)
            # the main thread waits for the device and cannot be interrupted
            os._exit(self._log.state.exit_code or LOST)

    def look(self, *, wait: float = 0.0) -> None:
        """Read and answer the log once, waiting up to wait for news; print the late ranks. Raises: RuntimeError."""
        self._log.look(
            is_waiting=lambda: self._oldest() is not None or self._detector.is_waiting,
            is_watching=True,
            before_answer=self._report.publish if self._report else lambda: None,
            wait=wait,
            within=self._warn_seconds,
        )
        pending = self._oldest()
        if pending:
            self._log_wait(pending)
        for stall in self._log.state.stalls:
            if stall.number not in self._reported:
                self._report_late(stall, pending)

    def _log_wait(self, pending: Pending) -> None:
        """Log, once, that this rank waits in an operation, if another rank has logged that or this one waits long."""
        stall = self._log.state.stall(pending.number)
        if stall is None and pending.seconds <= self._warn_seconds:
            return
        if self._logged_wait is None or self._logged_wait.number != pending.number:
            self._logged_wait, self._logged_at = pending, awake_seconds()
        if stall is None or self._control.rank not in stall.waiting:
            ranks = None if pending.ranks is None else list(pending.ranks)
            self._log.write("waits", pending.number, pending.label, ranks)

    def _report_late(self, stall: Stall, pending: Pending | None) -> None:
        if pending and pending.number == stall.number:
            # after two checks every rank that waits in it has written so
            if awake_seconds() - self._logged_at > 2 * self._look_seconds:
                self._reported.add(stall.number)
                ranks = range(self._control.world_size) if pending.ranks is None else pending.ranks
                late = [rank for rank in ranks if rank not in stall.waiting]
                named = self._log.name(late)
                verb = "has" if len(late) == 1 else "have"
                self._late_texts[stall.number] = f"{named} {verb} not started it" if late else "all ranks are in it"
                self._say(self._waits(pending, self._late_texts[stall.number]))
            return
        is_behind = pending is None or pending.number < stall.number
        # the log keeps an operation that has ended
        is_past = self._logged_wait is not None and self._logged_wait.number >= stall.number
        if is_behind and not is_past and self._control.rank in stall.ranks:
            self._reported.add(stall.number)
            self._say(f"{self._here} is late: other ranks wait for it in {stall.label}")

    def _report_silent_store(self) -> None:
        """Print, once per operation, that the store does not answer."""
        pending = self._oldest()
        if pending and pending.seconds > self._warn_seconds and pending.number not in self._reported:
            self._reported.add(pending.number)
            self._say(self._waits(pending, self._detector.no_answer))

    def _waits(self, pending: Pending, verdict: str) -> str:
        return (
            f"{self._here} has waited {pending.seconds:.1f} s in {pending.label}: "
            f"{verdict} (the job ends after {self._control.timeout_seconds:g} s)"
        )
