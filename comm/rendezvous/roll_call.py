"""Who still lives after a failure, found in a few requests of each rank, however many there are.

A rank that fails writes so behind one key. Each that lives writes its number, once, behind another; the first that
failed reads these and publishes the verdict. The others keep that, and say so: then the store may go.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Lock
from typing import Protocol

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous.job_store import KeyValue

ROLL_CALL_SECONDS = 5.0
"""How long the ranks have to answer; less, where nobody is missed but those whose processes have ended."""
LINGER_SECONDS = 2.0
"""How much longer than an answer's time its readers wait for the verdict, and its holder for ranks that are missed:
these may run, and are to keep the verdict, too."""
REQUESTS_SECONDS = 1.0
"""How much longer than such a time the requests in it may take."""
SHORTEST_PAUSE_SECONDS, COUNT_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.1, 0.8
"""Between two questions at a good end; of the one rank that counts; of the others, after the first few."""

LATE, LOST = "late", "lost"
"""What a roll call follows: a time limit; a rank's end, or its own failure."""

_FAILED = "bigbatch/failed"
_ALIVE = "bigbatch/alive"
_VERDICT = "bigbatch/verdict"
_HEARD = "bigbatch/heard"
_ENDED = "bigbatch/ended"


class Member(Protocol):
    """Says which rank calls or answers, and where. holder: who holds the store, such as "rank 0"."""

    rank: int
    world_size: int
    holder: str
    store: KeyValue


class RollCall:
    """Answers the others' roll call after a failure, or calls it. Any thread of a rank may.

    verdict: who is missed, or that nobody is; "" while this rank does not know. It is the same on all ranks.
    exit_code: with which the first rank that failed by itself ends, if it has said so.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self.verdict = ""
        self.exit_code: int | None = None
        self._cause = ""
        self._has_answered = self._has_told_heard = self._has_parted = False
        self._calling, self._parting = Lock(), Lock()

    def has_begun(self, *, within_seconds: float) -> bool:
        """Tell whether some rank has failed. Raises: RuntimeError where the store does not say so in time."""
        return bool(self.verdict) or self._member.store.within(within_seconds).check([_FAILED])

    def answer(self, *, is_waiting: bool, tell: Callable[[], None] = lambda: None, asks_for_more: bool = False) -> None:
        """Say, after another rank's failure, that this one lives; is_waiting: in an operation, for others itself.

        To be called again and again: the verdict is kept for later, too, when the store may be gone. After the loss of
        a rank all answer. After a time limit only those who wait: who does something else is the one that is missed.
        tell is called before, whether or not it answers. asks_for_more: the holder is to stay until part().
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
        """Return the verdict, after a failure that this rank has met: LATE or LOST. Takes some seconds, once."""
        with self._calling:
            if not self.verdict:
                try:
                    self.verdict = self._call(cause)
                except RuntimeError:
                    self.lose_holder()
        return self.verdict

    def lose_holder(self) -> str:
        """Return the verdict where the store answers no more; who has none by now misses its holder."""
        if not self.verdict:
            self._has_parted = True  # nobody is asked again
            self.verdict = f"no answer from {self._member.holder}, which holds the rendezvous"
        return self.verdict

    def report_own_failure(self, exit_code: int | None = None) -> None:
        """Let the others' waits end, and their roll call miss this rank; a failure reported before stays. part().

        exit_code: with which they are to end, too, instead of that of ranks that lost another one.
        """
        with self._calling:
            if not self.verdict:
                self._has_answered = True
                store = self._member.store.within(ROLL_CALL_SECONDS + LINGER_SECONDS + REQUESTS_SECONDS)
                store.append(_FAILED, f"{LOST} " if exit_code is None else f"{LOST}::{exit_code} ")
                self.verdict = "this rank has failed by itself"
        self.part()

    def part(self) -> None:
        """Say that this rank asks the store for nothing more; its holder stays until the others have said so.

        Or have had the time to.
        """
        with self._parting:
            # without a verdict the store has not answered
            if self._has_parted or not self.verdict:
                return
            self._has_parted = True
            store = self._member.store.within(ROLL_CALL_SECONDS + LINGER_SECONDS + REQUESTS_SECONDS)
            with suppress(RuntimeError):
                if self._member.holder == f"rank {self._member.rank}":
                    self._await_others(store)
                else:
                    self._say_heard(store)

    def end_well(self, *, within_seconds: float) -> None:
        """Say that this rank has passed the last barrier, and is missed by nobody. Its holder stays until all have.

        Or, where some cannot, until these know the verdict; for within_seconds at most.
        """
        if self.verdict or self._member.world_size == 1:
            return
        store = self._member.store.within(within_seconds + REQUESTS_SECONDS)
        store.append(_ENDED, f"{self._member.rank} ")
        if self._member.holder != f"rank {self._member.rank}":
            return
        deadline, pause = awake_seconds() + within_seconds, SHORTEST_PAUSE_SECONDS
        while len(_ranks(_ENDED, store)) < self._member.world_size and awake_seconds() < deadline:
            if not self._cause:
                self.answer(is_waiting=True)
                if self._cause:  # a verdict comes soon, or never: a rank that fails by itself calls no roll
                    deadline = min(deadline, awake_seconds() + ROLL_CALL_SECONDS + 2 * LINGER_SECONDS)
            elif self._has_heard(store):
                break
            time.sleep(pause)
            pause = min(2 * pause, COUNT_PAUSE_SECONDS)
        self.part()

    def _call(self, cause: str) -> str:
        store = self._member.store.within(ROLL_CALL_SECONDS + LINGER_SECONDS + REQUESTS_SECONDS)
        store.append(_FAILED, f"{cause}:{self._member.rank} ")
        self._say_alive(store)
        caller = next(int(rank) for rank in self._read_failures(store) if rank)
        return self._count(store) if caller == self._member.rank else self._listen(store, caller)

    def _read_failures(self, store: KeyValue) -> list[str]:
        """Keep what the first failure was; return the ranks that failed, in turn.

        "" for one that failed by itself, which does not call the roll.
        """
        failures = [(*word.split(":"), "", "")[:3] for word in store.get(_FAILED).decode().split()]
        self._cause, _, code = failures[0]
        self.exit_code = int(code) if code else None
        return [rank for _, rank, _ in failures]

    def _count(self, store: KeyValue) -> str:
        """Read who answers, and publish who does not."""
        deadline = awake_seconds() + ROLL_CALL_SECONDS
        while True:
            gone = store.gone()  # first: a rank that ends well between the two is not missed
            missing = self._missing(store)
            if not missing - gone or awake_seconds() >= deadline:
                break
            time.sleep(COUNT_PAUSE_SECONDS)
        verdict = _name(missing, store)
        store.set(_VERDICT, verdict)
        return verdict

    def _listen(self, store: KeyValue, caller: int) -> str:
        """Wait for the verdict of the rank that counts; where none comes, it may have ended, or be slow."""
        deadline, pause = awake_seconds() + ROLL_CALL_SECONDS + LINGER_SECONDS, COUNT_PAUSE_SECONDS
        while not self._has_heard(store):
            if awake_seconds() > deadline:
                where = f"rank {caller} on {host_of(caller, store)}"
                return f"{_name(self._missing(store), store)}, and no verdict from {where}, which counted the answers"
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return self.verdict

    def _has_heard(self, store: KeyValue) -> bool:
        """Keep the verdict, once it is there."""
        if not self.verdict and store.check([_VERDICT]):
            self.verdict = store.get(_VERDICT).decode()
        return bool(self.verdict)

    def _missing(self, store: KeyValue) -> set[int]:
        return set(range(self._member.world_size)) - _ranks(_ALIVE, store) - _ranks(_ENDED, store)

    def _say_alive(self, store: KeyValue) -> None:
        if not self._has_answered:
            store.append(_ALIVE, f"{self._member.rank} ")
            # not before: what is not written must be written again
            self._has_answered = True

    def _say_heard(self, store: KeyValue) -> None:
        if not self._has_told_heard:
            store.append(_HEARD, f"{self._member.rank} ")
            # append() returns before the store has it, and this process may end
            self._has_told_heard = store.check([_HEARD])

    def _await_others(self, store: KeyValue) -> None:
        """Wait until all others have heard the verdict, those that are missed for a shorter time."""
        start = awake_seconds()
        while (waited := awake_seconds() - start) < ROLL_CALL_SECONDS + LINGER_SECONDS:
            gone = store.gone()
            unaware = set(range(self._member.world_size)) - _ranks(_HEARD, store) - _ranks(_ENDED, store)
            unaware.discard(self._member.rank)
            if waited >= LINGER_SECONDS and store.check([_VERDICT]):
                unaware &= _ranks(_ALIVE, store)
            if not unaware - gone:
                return
            time.sleep(COUNT_PAUSE_SECONDS)


def host_of(rank: int, store: KeyValue) -> str:
    """Say where a rank runs."""
    key = f"bigbatch/host/{rank}"
    return store.get(key).decode() if store.check([key]) else "a host that has not met"


def _ranks(key: str, store: KeyValue) -> set[int]:
    return set(map(int, store.get(key).split())) if store.check([key]) else set()


def _name(missing: Iterable[int], store: KeyValue) -> str:
    places = [f"{rank} on {host_of(rank, store)}" for rank in sorted(missing)]
    return f"no answer from rank {', '.join(places)}" if places else "all ranks still answer"
