"""This rank's access to the log of failures in the job's store: it reads all events and appends its own."""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Protocol

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous import limits
from bigbatch.comm.rendezvous.failures import JobState, after, answer, describe
from bigbatch.comm.rendezvous.job_store import KeyValue
from bigbatch.words import MAX_NAMED, listed, name_ranks

LOG = "bigbatch/failures"


class Job(Protocol):
    """This rank and its job. holder: what the store runs beside, such as "rank 0"; library: name of the transport."""

    rank: int
    world_size: int
    store: KeyValue
    holder: str
    library: str
    timeout_seconds: float

    def host_of(self, rank: int) -> str:
        """Return a rank's host."""
        ...


class FailureLog:
    """Reads the log into a JobState, and appends what failures.answer() demands of this rank. Thread-safe."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.state = JobState(job.world_size)
        self._num_read = self._num_gone = 0
        """Bytes of the log that the state includes, and clients of the store that had ended then."""
        self._reading = Lock()

    def look(
        self,
        *,
        is_waiting: Callable[[], bool] = lambda: True,
        is_watching: bool = False,
        before_answer: Callable[[], None] = lambda: None,
        wait: float = 0.0,
        within: float = limits.ROLL_CALL_SECONDS + limits.REQUESTS_SECONDS,
    ) -> None:
        """Read new events, waiting up to wait for them, and append those that answer() demands of this rank.

        within: time limit of the requests, in addition to wait. Raises: RuntimeError.
        """
        store = self._job.store.within(wait + within)
        self.read(store, wait)
        if self.state.cause and not self.state.verdict:
            before_answer()
        rank = self._job.rank
        while event := answer(self.state, rank, now=awake_seconds(), is_waiting=is_waiting(), is_watching=is_watching):
            name, _, *facts = event
            if name == "verdict":
                facts.append(describe(self.state, facts[0], self.name))
            self._append(store, name, *facts)
            self.read(store)

    def read(self, store: KeyValue, wait: float = 0.0) -> None:
        """Read new events, and which processes have ended; wait up to wait seconds for either."""
        begin = self._num_read
        news = store.tail(LOG, begin, num_gone=self._num_gone, seconds=wait)
        now = awake_seconds()
        with self._reading:
            new = news.text[self._num_read - begin :]  # another thread may have read a part of it meanwhile
            self._num_read = max(self._num_read, begin + len(news.text))
            self._num_gone = news.num_gone
            state = replace(self.state, gone=self.state.gone | news.gone)
            self.state = after(state, json.loads(b"[%b]" % b",".join(new.splitlines())), now=now)

    def write(self, name: str, *facts: object, within: float = limits.ROLL_CALL_SECONDS) -> None:
        """Append an event of this rank. Raises: RuntimeError."""
        self._append(self._job.store.within(within), name, *facts)

    def _append(self, store: KeyValue, name: str, *facts: object) -> None:
        store.append(LOG, json.dumps((name, self._job.rank, *facts)) + "\n")

    def look_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Call look() until is_over(), or for this many seconds. Raises: RuntimeError."""
        deadline, pause = awake_seconds() + seconds, limits.FIRST_PAUSE_SECONDS
        self.look()
        while not is_over() and (left := deadline - awake_seconds()) > 0:
            # a store that tells of news at once would be asked by all ranks after each line
            time.sleep(self._job.world_size / limits.MAX_LOOKS_PER_SECOND if self._job.store.can_wait else pause)
            self.look(wait=min(pause, left))
            is_awaited = self.is_holder or self.state.caller == self._job.rank
            pause = min(2 * pause, limits.COUNT_PAUSE_SECONDS if is_awaited else limits.LONGEST_PAUSE_SECONDS)

    def name(self, ranks: Iterable[int]) -> str:
        """Return "rank 3 on node1, 4 on node2", or the first of many; without hosts if the store is lost."""
        ranks = sorted(ranks)
        with suppress(RuntimeError):
            named = [f"{rank} on {self._job.host_of(rank)}" for rank in ranks[:MAX_NAMED]]
            return f"rank {listed([*named, *ranks[MAX_NAMED:]], most=MAX_NAMED)}"
        return name_ranks(ranks)

    @property
    def is_holder(self) -> bool:
        """Return whether the store ends with this rank."""
        return self._job.holder == f"rank {self._job.rank}"

    def wake(self) -> None:
        """End all ranks' waits for news, so that a waiting thread of this rank can end."""
        if self._job.store.can_wait:
            self._job.store.within(limits.PEER_CHECK_SECONDS).append(LOG, "")
