"""Requests to torch's stores with a time limit, which torch's own requests do not have."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Lock, Thread
from threading import enumerate as running_threads
from typing import TypeVar

from torch._C._distributed_c10d import Store

from bigbatch.awake import awake_seconds, wait_awake

T = TypeVar("T")

KEY_PAUSES_SECONDS = 0.0005, 0.02
"""First and longest pause between two checks for a missing key."""
_THREAD_NAME = "bigbatch-ask"


@dataclass(frozen=True)
class News:
    """The new part of a value, and the ranks whose processes have ended. num_gone: number of all clients that have."""

    text: bytes
    gone: frozenset[int] = frozenset()
    num_gone: int = 0


class NoAnswerError(RuntimeError):
    """A store has not answered a request in time."""


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """Call ask on a new thread; return or raise its result. Raises: NoAnswerError after seconds."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except Exception as error:  # raised again below
            future.set_exception(error)

    Thread(target=run, name=_THREAD_NAME, daemon=True).start()
    # not by result(): the request may itself raise a TimeoutError
    if not wait_awake(lambda left: bool(wait([future], timeout=left).done), max(0.0, seconds)):
        raise NoAnswerError(f"a request was not answered within {max(0.0, seconds):.1f} s")
    return future.result()


def has_request_under_way() -> bool:
    """Return whether a request of this process is under way, including one that has timed out."""
    return any(thread.name == _THREAD_NAME for thread in running_threads())


def wait_until(
    is_so: Callable[[], bool], seconds: float, *, pauses_seconds: tuple[float, float] = (0.02, 0.02)
) -> bool:
    """Poll is_so up to seconds; return whether it became true. The pause doubles from the first value to the second."""
    deadline, (pause, longest) = awake_seconds() + seconds, pauses_seconds
    while not is_so():
        if awake_seconds() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


class BoundedStore:
    """Sends requests to one of torch's stores, each on its own thread with a time limit of seconds.

    torch's own requests wait without limit. A request that has timed out may still be executed when the server
    continues, so a write may happen late. Requests take turns, as inside torch's store: a stopped server costs one
    thread, not one per request. Raises: NoAnswerError; RuntimeError if the connection has ended.
    """

    can_wait = False
    """A wait in torch's store blocks other threads."""

    def __init__(
        self, store: Store, *, seconds: float, deadline: float = float("inf"), turn: "Lock | None" = None
    ) -> None:
        """deadline: end of all requests, by awake_seconds(). turn: held by the request under way."""
        self.torch_store = store
        """For torch's process groups only: its requests have no time limit."""
        self._seconds, self._deadline = seconds, deadline
        self._turn = turn or Lock()

    def within(self, seconds: float) -> "BoundedStore":
        """Return a view of the same store with one deadline for all its requests, in seconds from now."""
        deadline = min(self._deadline, awake_seconds() + seconds)
        return BoundedStore(self.torch_store, seconds=self._seconds, deadline=deadline, turn=self._turn)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self.torch_store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._ask(lambda: self.torch_store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: self.torch_store.check(list(keys)))

    def add(self, key: str, count: int) -> int:
        """Add count to a key's number, 0 if missing; return the sum."""
        return self._ask(lambda: self.torch_store.add(key, count))

    def append(self, key: str, value: str) -> None:
        self._ask(lambda: self.torch_store.append(key, value))  # type: ignore[attr-defined]

    def delete_key(self, *keys: str) -> None:
        self._ask(lambda: [self.torch_store.delete_key(key) for key in keys])

    def tail(self, key: str, begin: int, *, num_gone: int, seconds: float) -> News:
        """Return a key's value from byte `begin` on, at once; no ranks: torch's stores do not know their clients."""
        return News(self.get(key)[begin:] if self.check([key]) else b"")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(map(self.get, keys))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that do not exist."""
        return [key for key in keys if not self.check([key])]

    def wait_for(self, *keys: str, seconds: float) -> bool:
        """Wait up to seconds for keys; return whether all exist. Polls: torch's own wait blocks other threads."""
        return wait_until(lambda: self.check(keys), seconds, pauses_seconds=KEY_PAUSES_SECONDS)

    def _ask(self, request: Callable[[], T]) -> T:
        deadline = min(awake_seconds() + self._seconds, self._deadline)
        left = max(0.0, deadline - awake_seconds())
        if not wait_awake(lambda each: self._turn.acquire(timeout=each), left):
            raise NoAnswerError(f"an earlier request was not answered within {left:.1f} s")

        def ask() -> T:
            try:
                return request()
            finally:
                self._turn.release()

        return answer_within(deadline - awake_seconds(), ask)
