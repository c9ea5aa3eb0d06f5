"""Failure detector: which ranks are lost, why and since when, for every backend and without a collective."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, get_ident
from typing import TypeVar

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous import limits
from bigbatch.comm.rendezvous.bounded_store import NoAnswerError, answer_within
from bigbatch.comm.rendezvous.failure_log import FailureLog, Job
from bigbatch.comm.rendezvous.failures import LATE, LOST, Verdict
from bigbatch.errors import CRASHED, FAILED, PIPE_CLOSED, CommError, PeerLostError, first_line
from bigbatch.words import name_ranks

T = TypeVar("T")


class FailureDetector:
    """Ends waits of this rank that cannot succeed, with a verdict that is the same on all ranks. Thread-safe.

    The ranks talk through a log in the store (failures.py has its rules), so this works when the transport fails.
    is_watched: a thread reads the log continuously (see Watch), so waits need not read it.
    """

    def __init__(self, job: Job) -> None:
        self._job, self.log = job, FailureLog(job)
        self.is_watched = False
        self.has_failed = self._has_stopped_requests = False
        """has_failed: this rank has received an error about a failure, or reports one itself."""
        self._own_verdict: Verdict | None = None
        """Verdict of this rank alone, after it has failed on its own or has lost the store."""
        self.has_lost_store = False
        """Whether the thread that reads the log (see Watch) gets no answer from the store."""
        self.heals = False
        """Whether this process, with any store that it runs, continues after a rank is lost."""
        self._num_begun = 0
        self._verdict_lock, self._stop_lock = Lock(), Lock()
        self._waiting = set[int]()
        """Threads of this rank that wait for other ranks outside the queue of operations."""

    @property
    def verdict(self) -> Verdict | None:
        """Return which ranks are lost and why; None if there is no verdict yet."""
        return self._own_verdict or self.log.state.verdict

    @property
    def no_answer(self) -> str:
        """Return the message that the store does not answer."""
        holder = self._job.holder
        if not holder.startswith("rank "):  # a script's own process group holds it
            return f"no answer from the store of {holder}"
        return f"no answer from the job's key-value store, which runs beside {holder}"

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this thread as waiting for other ranks in the block, so that this rank answers a roll call."""
        self._waiting.add(get_ident())
        try:
            yield
        finally:
            self._waiting.discard(get_ident())

    def begin(self) -> None:
        """Count an operation that all ranks begin."""
        self._num_begun += 1

    def check_peers(self, label: str, seconds: float) -> None:
        """Raise PeerLostError if a wait cannot succeed because another rank has failed or left."""
        # another thread of this rank is about to report a failure: to a wait in its queue it will say more
        if self.has_failed and not (self.verdict and get_ident() in self._waiting):
            return
        if not self.is_watched:
            with suppress(RuntimeError):  # the operation itself is about to fail with a better message
                self.log.read(self._job.store.within(limits.PEER_CHECK_SECONDS))
        if reason := self.why_hopeless():
            error = RuntimeError(reason)
            raise self.make_error_and_stop_requests(label, seconds, error) from error

    def why_hopeless(self) -> str:
        """Return why this rank's wait cannot succeed, from the log as last read; "" if nothing prevents it."""
        state = self.log.state
        if self.verdict or state.cause:
            ended = f"the process of {self.log.name(state.vanished)} has ended"
            return ended if state.vanished else "another rank reports a failure"
        return self._who_left()

    def _who_left(self) -> str:
        early = self.log.state.left_before(self._num_begun)
        return f"{self.log.name(early)} ended, or closed its communicator, before this operation" if early else ""

    def raise_if_failed(self, label: str, seconds: float) -> None:
        """Raise PeerLostError if another rank has failed, or after timeout_seconds: for libraries without a limit."""
        self.check_peers(label, seconds)
        if seconds > self._job.timeout_seconds:
            raise self.make_error_and_stop_requests(label, seconds, late_error())

    def raise_if_failed_or_store_lost(self, label: str, seconds: float) -> None:
        """Like raise_if_failed, but also raise if the store is lost: for libraries that do not notice it."""
        self.raise_if_failed(label, seconds)
        if self.has_lost_store and seconds > limits.STORE_LOST_SECONDS and not self.has_failed:
            raise self.make_error_and_stop_requests(label, seconds, RuntimeError(self.no_answer))

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn errors of the store or torch in the block into a PeerLostError that names the missing ranks."""
        start = awake_seconds()
        try:
            yield
        except CommError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.make_error_and_stop_requests(what, awake_seconds() - start, error) from error

    def bounded(self, label: str, operation: Callable[[], T]) -> T:
        """Run an operation on torch's store on a new thread: the store's own timeouts work only while it answers.

        Raises: what operation raises; PeerLostError after the time limit.
        """
        start = awake_seconds()
        try:
            return answer_within(self._job.timeout_seconds + limits.GRACE_SECONDS, operation)
        except NoAnswerError:
            raise self.make_error_and_stop_requests(label, awake_seconds() - start, late_error()) from None

    def make_error_and_stop_requests(self, label: str, seconds: float, error: Exception) -> PeerLostError:
        """Find the lost ranks (takes seconds), stop this rank's requests to the store, and return the PeerLostError.

        On the store's rank this waits until the other ranks send no more requests.
        """
        failure = self.make_error(label, seconds, error)
        self.stop_requests()
        return failure

    def make_error(self, label: str, seconds: float, error: Exception) -> PeerLostError:
        """Like make_error_and_stop_requests, but the caller must call stop_requests() afterwards."""
        self.has_failed = True
        is_late = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
        # a store that has not answered for so long is not asked again
        is_store_lost = isinstance(error, NoAnswerError)
        verdict = self._lose_store() if is_store_lost else self.roll_call(LATE if is_late else LOST)
        reason = f"{verdict.reason} ({self._job.library}: {first_line(error)})"
        if not verdict.lost and (left := self._who_left()):
            reason = f"{left}; do all ranks make the same number of steps?"
        failure = PeerLostError(f"{self.failed(label, seconds)}; {reason}")
        failure.lost_ranks = verdict.lost
        failure.exit_code = self.log.state.exit_code or failure.exit_code
        return failure

    def failed(self, label: str, seconds: float) -> str:
        """Return what failed on this rank, and after how long."""
        return f"rank {self._job.rank}: {label} failed after {seconds:.1f} s"

    def roll_call(self, kind: str) -> Verdict:
        """Return the verdict after a failure on this rank. kind: LATE or LOST. The first one takes seconds."""
        with self._verdict_lock:
            if not self.verdict:
                with suppress(RuntimeError):
                    self.log.look()
                    if not self.verdict and self.log.state.caller is None:
                        self.log.write("failed", kind)
                    limit = limits.ROLL_CALL_SECONDS + limits.LINGER_SECONDS + limits.REQUESTS_SECONDS
                    self.log.look_until(lambda: self.verdict is not None, limit)
            return self.verdict or self._lose_store()

    def _lose_store(self) -> Verdict:
        """Return the verdict after the store is lost: its holder is lost, unless other ranks have ended."""
        if not self.verdict:
            self._has_stopped_requests = True  # no more requests
            lost = self.log.state.vanished
            reason = (
                f"no answer from {self.log.name(lost)}; then none from the job's key-value store"
                if lost
                else self.no_answer
            )
            holder = [rank for rank in range(self._job.world_size) if self._job.holder == f"rank {rank}"]
            self._own_verdict = Verdict(lost or frozenset(holder), reason, awake_seconds())
        assert self.verdict is not None
        return self.verdict

    def publish_crash(self, exit_code: int = CRASHED) -> None:
        """Publish that this rank has failed on its own: the waits of other ranks end, and the verdict names it.

        After an earlier failure, that verdict stays. Calls stop_requests(). If exit_code means that the same command
        would fail again, the other ranks end with this code, too. Raises: RuntimeError.
        """
        self.has_failed = True
        with self._verdict_lock:
            if not self.verdict:
                self.log.write("crashed", exit_code if exit_code in (FAILED, PIPE_CLOSED) else None)
                mine = frozenset({self._job.rank})
                self._own_verdict = Verdict(mine, "this rank itself has failed", awake_seconds())
        self.stop_requests()

    def stop_requests(self) -> None:
        """Publish that this rank sends no more requests; the store's holder waits, not forever, until no rank does."""
        with self._stop_lock:
            # without a verdict the store has not answered
            if self._has_stopped_requests or not self.verdict:
                return
            self._has_stopped_requests = True
            begin, seconds = awake_seconds(), limits.ROLL_CALL_SECONDS + limits.LINGER_SECONDS
            if self.heals:  # missing ranks can read the verdict later
                begin -= limits.LINGER_SECONDS
            with suppress(RuntimeError):
                self.log.write("heard", within=seconds)
                if self.log.is_holder:
                    rank = self._job.rank
                    self.log.look_until(lambda: self.log.state.may_leave(rank, awake_seconds() - begin), seconds)

    def publish_departure(self) -> None:
        """Publish that this rank begins no more operations, so that waits for it end. Raises: RuntimeError."""
        self.log.write("left", self._num_begun)

    def publish_success(self, *, within_seconds: float) -> None:
        """Publish that this rank has passed the last barrier; the store's holder waits until all ranks have.

        If some cannot, it waits until they know the verdict. The wait takes within_seconds at most.
        """
        if self.verdict or self._job.world_size == 1:
            return
        with suppress(RuntimeError):  # the store has ended
            self.log.write("ended")
            if self.log.is_holder:
                self.log.look_until(lambda: self.log.state.needs_no_store(awake_seconds()), within_seconds)
                self.stop_requests()


def late_error(late: Sequence[int] = ()) -> TimeoutError:
    """Return the error of an operation whose time is over. late: the ranks that have not begun it, if known."""
    who = f"{name_ranks(late)} did not begin" if late else "not all ranks finished"
    return TimeoutError(f"timed out: {who} this operation")
