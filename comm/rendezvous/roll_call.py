"""Roll call after a failure: which ranks still answer, in a few requests per rank for any number of ranks.

A rank that fails appends to one key. Each live rank appends its number once to a second key. The first rank that
failed reads these and publishes the verdict. The others read it and acknowledge it; then the store may end.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Lock
from typing import Protocol

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous.bounded_store import wait_until
from bigbatch.comm.rendezvous.job_store import KeyValue
from bigbatch.exit_codes import CRASHED, FAILED, PIPE_CLOSED

HEED_SECONDS = 1.0
"""Limit of the question, during another wait, whether a rank has failed."""
SILENCE_SECONDS = 3.0
"""Time after the end of a wait within which the store must answer; otherwise it is unreachable."""
ROLL_CALL_SECONDS = 5.0
"""Time for the ranks to answer; it ends earlier if only ranks whose processes have ended are missing."""
LINGER_SECONDS = 2.0
"""Additional time for ranks to read the verdict, and for the store's holder to wait for missing ranks, which may still
run and must read it, too."""
REQUESTS_SECONDS = 1.0
"""Additional time for the requests themselves."""
FIRST_PAUSE_SECONDS, COUNT_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.1, 0.8
"""Pauses between polls: at a good end; of the rank that counts; of the others, after the first few."""
LOOK_SECONDS = 1.0
"""Longest pause between two polls of the stall inspector."""
FLIGHT_SECONDS = 2.0
"""Limit for dumping torch's flight recorder and writing its file."""
EXPLAIN_SECONDS = ROLL_CALL_SECONDS + LINGER_SECONDS + 2 * REQUESTS_SECONDS
"""Limit of the control's explanation: its own limits, and time for its requests."""
VERDICT_SECONDS = LOOK_SECONDS + FLIGHT_SECONDS + 2 * EXPLAIN_SECONDS
"""Time after the time limit for the verdict and the requests of others; a library's own limit must be longer."""

LATE, LOST = "late", "lost"
"""Cause of a roll call: a time limit; the end or failure of a rank."""

HOST = "bigbatch/host"  # the host of each rank that has met
_LEFT = "bigbatch/left"  # ranks that begin no more operations, and how many they have begun
_FAILED = "bigbatch/failed"  # failures in turn: cause, rank (none for one that failed by itself), exit code
_ALIVE = "bigbatch/alive"  # ranks that have answered
_MISSING = "bigbatch/missing"  # ranks that the verdict names
_VERDICT = "bigbatch/verdict"  # of the rank that counts the answers
_HEARD = "bigbatch/heard"  # ranks that ask the store for nothing more
_ENDED = "bigbatch/ended"  # ranks that have passed the last barrier


class RankAndStore(Protocol):
    """The rank that calls or answers, and its store. holder: what holds the store, such as "rank 0"."""

    rank: int
    world_size: int
    holder: str
    store: KeyValue


class RollCall:
    """Answers a roll call of other ranks after a failure, or starts one. Thread-safe.

    verdict: which ranks are missing, or that none is; "" before it is known. The same on all ranks.
    lost_ranks: the ranks that the verdict names.
    exit_code: of the first rank that failed by itself, if it has published one.
    has_failed: this rank reports a failure, or is about to.
    """

    def __init__(self, member: RankAndStore) -> None:
        self._member = member
        self.verdict = ""
        self.lost_ranks: frozenset[int] = frozenset()
        self.exit_code: int | None = None
        self.has_failed = False
        self._cause, self._num_begun = "", 0
        self._has_answered = self._has_told_heard = self._has_parted = False
        self._calling, self._parting = Lock(), Lock()

    @property
    def silence(self) -> str:
        """Return the message that the store's holder does not answer."""
        return f"no answer from {self._member.holder}, which holds the rendezvous"

    def _store(self) -> KeyValue:
        """Return a view of the store with time for a verdict."""
        return self._member.store.within(ROLL_CALL_SECONDS + LINGER_SECONDS + REQUESTS_SECONDS)

    def begin(self) -> None:
        """Count an operation that all ranks begin."""
        self._num_begun += 1

    def leave(self) -> None:
        """Publish, once, that this rank begins no more operations; waits of others for it end then."""
        store = self._member.store.within(ROLL_CALL_SECONDS)
        store.append(_LEFT, f"{self._member.rank}:{self._num_begun} ")

    def reason_to_end(self) -> str:
        """Return why this rank's wait cannot succeed: another rank reports a failure, or left before; "" if it can.

        Raises: RuntimeError if the store does not answer within HEED_SECONDS.
        """
        store = self._member.store.within(HEED_SECONDS)
        if self.verdict or store.check([_FAILED]):
            return "another rank reports a failure"
        if not store.check([_LEFT]):
            return ""
        left = (map(int, word.split(":")) for word in store.get(_LEFT).decode().split())
        early = _places((rank for rank, num_begun in left if num_begun < self._num_begun), store)
        return f"{early} ended, or closed its connection, before it" if early else ""

    def answer(self, *, is_waiting: bool, tell: Callable[[], None] = lambda: None, asks_for_more: bool = False) -> None:
        """Answer a roll call after another rank's failure, if there is one. Call it periodically.

        is_waiting: this rank waits for others in an operation. After the loss of a rank all ranks answer. After a time
        limit only waiting ranks do: one that does something else is the missing one. Keeps the verdict for later, when
        the store may have ended. tell: called before the answer. asks_for_more: the holder must stay until part().
        """
        if self.verdict:
            return
        store = self._member.store.within(ROLL_CALL_SECONDS + REQUESTS_SECONDS)
        if not self._cause:
            if not store.check([_FAILED]):
                return
            self._read_failures(store)
        tell()
        if is_waiting or self._cause == LOST:
            self._say_alive(store)
        if self._has_heard(store) and not asks_for_more:
            self._say_heard(store)

    def call(self, cause: str) -> str:
        """Return the verdict after a failure on this rank. cause: LATE or LOST. Takes some seconds, once."""
        with self._calling:
            if not self.verdict:
                try:
                    self.verdict = self._call(cause)
                except RuntimeError:
                    self.lose_holder()
        return self.verdict

    def lose_holder(self) -> str:
        """Return the verdict after the store is lost: its holder is missing, unless a verdict is known."""
        if not self.verdict:
            self._has_parted = True  # no more requests
            self.lost_ranks = frozenset(n for n in range(self._member.world_size) if self._member.holder == f"rank {n}")
            self.verdict = self.silence
        return self.verdict

    def report_own_failure(self, exit_code: int = CRASHED) -> None:
        """Publish that this rank has failed by itself: the waits of others end, and their roll call misses it.

        An earlier failure stays the first. Calls part(). If exit_code says that the same command would fail again, the
        other ranks end with it, too.
        """
        self.has_failed = True
        code = f"::{exit_code}" if exit_code in (FAILED, PIPE_CLOSED) else ""
        with self._calling:
            if not self.verdict:
                self._has_answered = True
                self._store().append(_FAILED, f"{LOST}{code} ")
                self.verdict = "this rank has failed by itself"
        self.part()

    def part(self) -> None:
        """Publish that this rank sends no more requests; on the store's holder, wait for the others to do so, too.

        That wait has a limit.
        """
        with self._parting:
            # without a verdict the store has not answered
            if self._has_parted or not self.verdict:
                return
            self._has_parted = True
            store = self._store()
            with suppress(RuntimeError):
                if self._member.holder == f"rank {self._member.rank}":
                    self._await_others(store)
                else:
                    self._say_heard(store)

    def end_well(self, *, within_seconds: float) -> None:
        """Publish that this rank has passed the last barrier; on the store's holder, wait for the others to do so.

        If some cannot, wait until they know the verdict. The wait takes within_seconds at most.
        """
        if self.verdict or self._member.world_size == 1:
            return
        with suppress(RuntimeError):  # the store has ended
            self._end_well(within_seconds)

    def _end_well(self, within_seconds: float) -> None:
        store = self._member.store.within(within_seconds + REQUESTS_SECONDS)
        store.append(_ENDED, f"{self._member.rank} ")
        if self._member.holder != f"rank {self._member.rank}":
            return
        deadline, pause = awake_seconds() + within_seconds, FIRST_PAUSE_SECONDS
        while len(_ranks(_ENDED, store)) < self._member.world_size and awake_seconds() < deadline:
            if not self._cause:
                self.answer(is_waiting=True)
                if self._cause:  # a rank that failed by itself starts no roll call, so a verdict may never come
                    deadline = min(deadline, awake_seconds() + ROLL_CALL_SECONDS + 2 * LINGER_SECONDS)
            elif self._has_heard(store):
                break
            time.sleep(pause)
            pause = min(2 * pause, COUNT_PAUSE_SECONDS)
        self.part()

    def _call(self, cause: str) -> str:
        store = self._store()
        store.append(_FAILED, f"{cause}:{self._member.rank} ")
        self._say_alive(store)
        caller = next(int(rank) for rank in self._read_failures(store) if rank)
        if caller == self._member.rank:
            return self._count(store)
        # without a verdict: the rank that counts has ended, or is slow
        pauses = COUNT_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
        if wait_until(lambda: self._has_heard(store), ROLL_CALL_SECONDS + LINGER_SECONDS, pauses_seconds=pauses):
            return self.verdict
        where = f"rank {caller} on {host_of(caller, store)}"
        missing = self._missing(store)
        self.lost_ranks = frozenset(missing | {caller})
        return f"{_name(missing, store)}, and no verdict from {where}, which counted the answers"

    def _read_failures(self, store: KeyValue) -> list[str]:
        """Store the first failure's cause; return the ranks that failed, in order.

        "" for a rank that failed by itself: it starts no roll call.
        """
        failures = [(*word.split(":"), "", "")[:3] for word in store.get(_FAILED).decode().split()]
        self._cause, _, code = failures[0]
        self.exit_code = int(code) if code else None
        return [rank for _, rank, _ in failures]

    def _count(self, store: KeyValue) -> str:
        """Read which ranks answer, and publish which do not."""
        missing: set[int] = set()

        def have_answered() -> bool:
            nonlocal missing
            gone = store.gone()  # first: a rank that ends well between the two requests is not missing
            missing = self._missing(store)
            return not missing - gone

        wait_until(have_answered, ROLL_CALL_SECONDS, pauses_seconds=(COUNT_PAUSE_SECONDS, COUNT_PAUSE_SECONDS))
        verdict = _name(missing, store)
        self.lost_ranks = frozenset(missing)
        store.set(_MISSING, " ".join(map(str, sorted(missing))))
        store.set(_VERDICT, verdict)
        return verdict

    def _has_heard(self, store: KeyValue) -> bool:
        """Read the verdict, if it is there; return whether it is known."""
        if not self.verdict and store.check([_VERDICT]):
            self.lost_ranks = frozenset(_ranks(_MISSING, store))
            self.verdict = store.get(_VERDICT).decode()
        return bool(self.verdict)

    def _missing(self, store: KeyValue) -> set[int]:
        return set(range(self._member.world_size)) - _ranks(_ALIVE, store) - _ranks(_ENDED, store)

    def _say_alive(self, store: KeyValue) -> None:
        if not self._has_answered:
            store.append(_ALIVE, f"{self._member.rank} ")
            # after the write: a failed write is repeated
            self._has_answered = True

    def _say_heard(self, store: KeyValue) -> None:
        if not self._has_told_heard:
            store.append(_HEARD, f"{self._member.rank} ")
            # check() waits for the answer; append() alone returns before the store has the value
            self._has_told_heard = store.check([_HEARD])

    def _await_others(self, store: KeyValue) -> None:
        """Wait until all others know the verdict; for missing ranks wait a shorter time."""
        start = awake_seconds()

        def have_heard() -> bool:
            gone = store.gone()
            unaware = set(range(self._member.world_size)) - _ranks(_HEARD, store) - _ranks(_ENDED, store)
            unaware.discard(self._member.rank)
            if awake_seconds() - start >= LINGER_SECONDS and store.check([_VERDICT]):
                unaware &= _ranks(_ALIVE, store)
            return not unaware - gone

        limit = ROLL_CALL_SECONDS + LINGER_SECONDS
        wait_until(have_heard, limit, pauses_seconds=(COUNT_PAUSE_SECONDS, COUNT_PAUSE_SECONDS))


def late_error() -> TimeoutError:
    """Return the cause of a wait that reached its limit."""
    return TimeoutError("some rank has not come to it")


def host_of(rank: int, store: KeyValue) -> str:
    """Return a rank's host."""
    key = f"{HOST}/{rank}"
    return store.get(key).decode() if store.check([key]) else "a host that has not met"


def _places(ranks: Iterable[int], store: KeyValue) -> str:
    named = ", ".join(f"{rank} on {host_of(rank, store)}" for rank in ranks)
    return f"rank {named}" if named else ""


def _ranks(key: str, store: KeyValue) -> set[int]:
    return set(map(int, store.get(key).split())) if store.check([key]) else set()


def _name(missing: Iterable[int], store: KeyValue) -> str:
    named = _places(sorted(missing), store)
    return f"no answer from {named}" if named else "all ranks still answer"
