"""The quiet line beside the data: how ranks find each other, compare texts, and learn who is missing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous.bounded_store import NoAnswerError, answer_within
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.late_ranks import WARN_SECONDS, name_ranks
from bigbatch.comm.rendezvous.meeting import GRACE_SECONDS, open_store
from bigbatch.comm.rendezvous.roll_call import (
    HEED_SECONDS,
    HOST,
    LATE,
    LOST,
    SILENCE_SECONDS,
    RollCall,
    host_of,
    late_error,
)
from bigbatch.errors import CommError, PeerLostError, first_line

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""torch's store ends a connection over which more than 8 MB come at once."""

_connections = 0
"""How many this process has made: several in one job must not read each other's keys."""


class Control:
    """Keeps a key-value store that all ranks reach, and what they tell each other through it.

    Collective: every rank constructs it, in the same order as its other ones. Works beside any backend, and goes
    on working when that one fails. timeout_seconds bounds every wait, and each request to the store, whose holder may
    be out of reach; meeting_seconds (None: as long) that for the ranks to come at all, of which those that are
    late are named after warn_seconds.
    Raises: CommError if the ranks cannot meet.
    """

    def __init__(
        self,
        env: ProcessEnv,
        *,
        timeout_seconds: float,
        meeting_seconds: float | None = None,
        warn_seconds: float = WARN_SECONDS,
        interface: str | None = None,
    ) -> None:
        global _connections
        # all ranks make theirs in the same order, so the same number names the same connection
        _connections += 1
        self.rank, self.world_size, self.host = env.rank, env.world_size, env.host
        self.timeout_seconds = timeout_seconds
        self.meeting_seconds = timeout_seconds if meeting_seconds is None else meeting_seconds
        self.warn_seconds = warn_seconds
        self.library = "control"
        self.store, self.holder, met = open_store(
            env,
            f"bigbatch/{_connections}",
            timeout_seconds=timeout_seconds,
            meeting_seconds=self.meeting_seconds,
            warn_seconds=warn_seconds,
            interface=interface,
        )
        self.master, self.secret = met.master, met.secret
        self._texts = 0
        self.roll_call = RollCall(self)
        with self.explained("meeting of all ranks"):
            self.store.set(f"{HOST}/{self.rank}", env.host)

    def gather_text(
        self, text: str, *, what: str = "comparison of a text over all ranks", timeout_seconds: float | None = None
    ) -> list[str]:
        """Gather a short text of every rank, in rank order, within timeout_seconds (None: as all waits). Collective.

        Rank 0 collects and publishes, so the cost is linear in ranks; it, which may hold the store, returns last:
        it can fail next without taking the answer with it.
        Raises: PeerLostError naming the missing ranks.
        """
        with self.explained(what):
            key, all_texts = self._collect(text, what=what, timeout_seconds=timeout_seconds)
            if self.rank != 0:
                all_texts = self._take(key, source=0, what=what, timeout_seconds=timeout_seconds).split("\0")
                self.store.set(f"{key}/read/{self.rank}", "1")
                return all_texts
            self._put(key, "\0".join(all_texts))
            for rank in range(1, self.world_size):
                # rank 0 may hold the store, so it stays until all have read
                self._await(f"{key}/read/{rank}", source=rank, what=what)
            return all_texts

    def collect_text(self, text: str, *, what: str) -> list[str]:
        """Gather texts for rank 0 alone, for long ones; the others get an empty list. Collective."""
        with self.explained(what):
            return self._collect(text, what=what)[1]

    def tell_all(self, text: str, *, what: str, timeout_seconds: float) -> str:
        """Return the first rank's text on all ranks, which wait for it as long as timeout_seconds. Collective.

        The first one waits for nobody: what comes next shows sooner than any limit that a rank was lost meanwhile.
        Raises: PeerLostError.
        """
        with self.explained(what):
            key = self.next_key()
            if self.rank != 0:
                return self._take(key, source=0, what=what, timeout_seconds=timeout_seconds)
            self._put(key, text)
            return text

    def describe_late_ranks(self) -> str:
        """Name the ranks that have not come to the meeting: rank 0 does; "" on others, and if all have come."""
        ranks = range(self.world_size if self.rank == 0 else 0)
        late = [rank for rank in ranks if not self.store.check([f"{HOST}/{rank}"])]
        limit = f"meeting_seconds={self.meeting_seconds:g}"
        return f"rank 0 on {self.host} waits for {name_ranks(late)} to start ({limit})" if late else ""

    def next_key(self) -> str:
        """Name the next exchange, alike on all ranks."""
        self._texts += 1
        return f"bigbatch/text/{self._texts}"

    def _collect(self, text: str, *, what: str, timeout_seconds: float | None = None) -> tuple[str, list[str]]:
        """Return the key of this exchange, and collect_text's answer."""
        key = self.next_key()
        if self.rank != 0:
            self._put(f"{key}/{self.rank}", text)
            return key, []
        texts = [text]
        for rank in range(1, self.world_size):
            texts.append(self._take(f"{key}/{rank}", source=rank, what=what, timeout_seconds=timeout_seconds))
        return key, texts

    def _put(self, key: str, text: str) -> None:
        """Write a text in pieces that the store takes."""
        data = text.encode()
        pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{key}/piece/{number}", piece)
        # last: who waits for this key finds all pieces there
        self.store.set(key, str(len(pieces)))

    def _take(self, key: str, *, source: int, what: str, timeout_seconds: float | None = None) -> str:
        """Wait for a rank's text and read it."""
        self._await(key, source=source, what=what, timeout_seconds=timeout_seconds)
        count = int(self.store.get(key))
        return b"".join(self.store.get(f"{key}/piece/{number}") for number in range(count)).decode()

    def read(self, key: str, *, what: str) -> str:
        """Read a short value that another rank writes, once it is there. Raises: PeerLostError."""
        with self.explained(what):
            self._await(key, what=what)
            return str(self.store.get(key).decode())

    def _await(self, key: str, *, what: str, source: int | None = None, timeout_seconds: float | None = None) -> None:
        """Wait for a key, and heed the others meanwhile. source: the rank that writes it, which must live so long."""
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        start, seconds, store = awake_seconds(), 0.0, self.store.within(limit + SILENCE_SECONDS)
        while not store.wait_for(key, min(HEED_SECONDS, max(0.0, limit - seconds))):
            seconds = awake_seconds() - start
            self.heed_others(what, seconds)
            # asked before the key: it may have written this at the very last
            if source in store.gone() and not store.check([key]):
                raise RuntimeError(f"the process of rank {source} has ended")
            if seconds > limit:
                raise late_error()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn what the store or torch raises inside into an error that says who is missing. Raises: PeerLostError."""
        start = awake_seconds()
        try:
            yield
        except CommError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.explain(what, awake_seconds() - start, error) from error

    def heed_others(self, label: str, seconds: float) -> None:
        """End a wait by another rank's failure, or by its end, so that no rank takes this one for lost."""
        if self.roll_call.has_failed:
            return  # this rank reports one itself, and is about to say which
        try:
            reason = self.roll_call.reason_to_end()
        except RuntimeError:
            return  # the operation itself is about to fail, and knows more; its own limit holds
        if reason:
            cause = RuntimeError(reason)
            raise self.explain(label, seconds, cause) from cause

    def give_up(self, label: str, seconds: float) -> None:
        """Heed, while waiting for a library that knows no time limit, the others, and this connection's own limit."""
        self.heed_others(label, seconds)
        if seconds > self.timeout_seconds:
            raise self.explain(label, seconds, late_error())

    def bounded(self, label: str, operation: Callable[[], T]) -> T:
        """Run, on a thread of its own, what asks torch's store itself: its limits need the store's answers.

        Raises: what operation raises; PeerLostError after the time limit.
        """
        start = awake_seconds()
        try:
            return answer_within(self.timeout_seconds + GRACE_SECONDS, operation)
        except NoAnswerError:
            raise self.explain(label, awake_seconds() - start, late_error()) from None

    def explain(self, label: str, seconds: float, error: Exception) -> CommError:
        """Say what failed, after how long, and which ranks do not answer any more. Takes a few seconds.

        This rank then asks the store for no more; its holder stays until the others have got as far.
        """
        failure = self.describe(label, seconds, error)
        self.roll_call.part()
        return failure

    def describe(self, label: str, seconds: float, error: Exception) -> CommError:
        """Say the same for one who still asks the store for more, and parts from the roll call afterwards."""
        self.roll_call.has_failed = True
        is_late = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
        # a holder that has not answered for so long is not asked again
        is_silent = isinstance(error, NoAnswerError)
        who = self.roll_call.lose_holder() if is_silent else self.roll_call.call(LATE if is_late else LOST)
        failure = PeerLostError(f"{self.failed(label, seconds)}; {who} ({self.library}: {first_line(error)})")
        failure.exit_code = self.roll_call.exit_code or failure.exit_code
        return failure

    def failed(self, label: str, seconds: float) -> str:
        """Say what failed on this rank, after how long."""
        return f"rank {self.rank}: {label} failed after {seconds:.1f} s"

    def has_met(self, rank: int) -> bool:
        """Tell whether a rank has come to the rendezvous, whatever it does now."""
        return bool(self.store.check([f"{HOST}/{rank}"]))

    def host_of(self, rank: int) -> str:
        """Say where a rank runs."""
        return host_of(rank, self.store)
