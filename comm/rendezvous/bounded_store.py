"""Requests to a store of torch's that always end, even if its holder is stopped or unreachable."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Lock, Thread
from typing import TypeVar

from torch._C._distributed_c10d import Store

from bigbatch.awake import awake_seconds, wait_awake

T = TypeVar("T")

KEY_PAUSES_SECONDS = 0.0005, 0.02
"""First and longest pause between two questions for a key that is not there yet."""


class NoAnswerError(RuntimeError):
    """The holder of a store has not answered a request in time."""


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """Return what ask returns or raise what it raises, on a thread of its own. Raises: NoAnswerError."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except Exception as error:  # raised again below
            future.set_exception(error)

    Thread(target=run, name="bigbatch-ask", daemon=True).start()
    # not by result(): the request may raise a TimeoutError of its own
    if not wait_awake(lambda left: bool(wait([future], timeout=left).done), max(0.0, seconds)):
        raise NoAnswerError(f"a request was not answered within {max(0.0, seconds):.1f} s")
    return future.result()


def wait_until(
    is_so: Callable[[], bool], seconds: float, *, pauses_seconds: tuple[float, float] = (0.02, 0.02)
) -> bool:
    """Ask again and again for so long; tell whether it became so. Pauses double from the first one up to the second."""
    deadline, (pause, longest) = awake_seconds() + seconds, pauses_seconds
    while not is_so():
        if awake_seconds() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


class BoundedStore:
    """Asks a store of torch's, each request on a thread of its own, and gives it up after seconds.

    torch's requests wait for their answer without limit. One that was given up may still be carried out when the holder
    goes on: what is written here may be written late. Requests take turns, as they do inside torch's store, so a holder
    that stands still costs one thread, and not one for each request.
    Raises: NoAnswerError; RuntimeError if the connection has ended.
    """

    def __init__(
        self,
        store: Store,
        *,
        seconds: float,
        deadline: float = float("inf"),
        turn: "Lock | None" = None,
    ) -> None:
        """deadline: when all requests are over; awake_seconds(). turn: held by the request that is under way."""
        self.torch_store = store
        """What torch's own process groups may ask; any other code that asks it may wait for ever."""
        self._seconds, self._deadline = seconds, deadline
        self._turn = turn or Lock()

    def within(self, seconds: float) -> "BoundedStore":
        """Return a view of the same store, whose requests are over in so many seconds, all of them together."""
        deadline = min(self._deadline, awake_seconds() + seconds)
        return BoundedStore(self.torch_store, seconds=self._seconds, deadline=deadline, turn=self._turn)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask(lambda: self.torch_store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Read a value that is there."""
        return self._ask(lambda: self.torch_store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of these keys are there."""
        return self._ask(lambda: self.torch_store.check(list(keys)))

    def add(self, key: str, count: int) -> int:
        """Count in a key, from 0; return the sum."""
        return self._ask(lambda: self.torch_store.add(key, count))

    def append(self, key: str, value: str) -> None:
        """Write behind the value of a key, from "" on."""
        self._ask(lambda: self.torch_store.append(key, value))  # type: ignore[attr-defined]

    def gone(self) -> frozenset[int]:
        """Name no rank: torch's stores do not know who asks."""
        return frozenset()

    def wait_for(self, key: str, seconds: float) -> bool:
        """Wait so long for a key; tell whether it is there. By asking: a store that waits serves no other thread."""
        return wait_until(lambda: self.check([key]), seconds, pauses_seconds=KEY_PAUSES_SECONDS)

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
