"""A key-value store whose every request has an end, also where its holder is stopped, or cut off without a word."""

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from copy import copy
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from bigbatch.awake import awake_seconds, wait_awake

T = TypeVar("T")

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0005, 0.02
"""Between two questions to the store for a key that is not there yet."""

_Request = tuple["Future[Any]", Callable[[], Any]]


class KeyValue(Protocol):
    """Answers requests, each within a limit, as BoundedStore does. Raises: NoAnswerError, RuntimeError."""

    def within(self, seconds: float) -> "KeyValue":
        """Return a view of the same store, whose requests are over in so many seconds, all of them together."""
        ...

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read a value that is there."""
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of these keys are there."""
        ...

    def add(self, key: str, count: int) -> int:
        """Count in a key, from 0; return the sum."""
        ...

    def append(self, key: str, value: str) -> None:
        """Write behind the value of a key, from "" on."""
        ...

    def wait_for(self, key: str, seconds: float) -> bool:
        """Wait so long for a key; tell whether it is there."""
        ...

    def gone(self) -> frozenset[int]:
        """Name the ranks whose processes have ended, as far as the holder knows: what it does not name may live."""
        ...

    @property
    def torch_store(self) -> Store:
        """Return what torch's own process groups may ask; whoever else asks it may wait for ever."""
        ...


class NoAnswerError(RuntimeError):
    """The holder of a store has not answered a request in time."""


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """Return what ask returns or raise what it raises, on a thread of its own. Raises: NoAnswerError."""
    requests: SimpleQueue[_Request | None] = SimpleQueue()
    Thread(target=_serve, args=(requests,), name="bigbatch-ask", daemon=True).start()
    try:
        return _answer_of(requests, ask, seconds)
    finally:
        requests.put(None)


class BoundedStore:
    """Asks a store of torch's, on a thread of its own, and gives a request up after seconds.

    torch's requests wait for their answer without limit, and keep every other thread out meanwhile. One that was
    given up may still be carried out, when the holder goes on: what is written here may be written late.
    Raises: NoAnswerError; RuntimeError where the connection has ended.
    """

    def __init__(self, store: Store, *, seconds: float) -> None:
        self.torch_store: Store = store
        self._seconds, self._deadline = seconds, float("inf")
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        thread = Thread(target=_serve, args=(self._requests,), name="bigbatch-store", daemon=True)
        thread.start()
        # views have the thread in common, and it ends with the last of them
        self._end = _End(self._requests)

    def within(self, seconds: float) -> "BoundedStore":
        """Return a view of the same store, whose requests are over in so many seconds, all of them together."""
        view = copy(self)
        view._deadline = min(self._deadline, awake_seconds() + seconds)
        return view

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
        """Name nobody: torch's stores do not know who asks."""
        return frozenset()

    def wait_for(self, key: str, seconds: float) -> bool:
        """Wait so long for a key; tell whether it is there. By asking: a store that waits serves no other thread."""
        deadline, pause = awake_seconds() + seconds, SHORTEST_PAUSE_SECONDS
        while not self.check([key]):
            if awake_seconds() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return True

    def _ask(self, request: Callable[[], T]) -> T:
        return _answer_of(self._requests, request, min(self._seconds, self._deadline - awake_seconds()))


class _End:
    """Ends the thread that serves these requests, once nobody can make any."""

    def __init__(self, requests: "SimpleQueue[_Request | None]") -> None:
        weakref.finalize(self, requests.put, None).atexit = False


def _serve(requests: "SimpleQueue[_Request | None]") -> None:
    while (request := requests.get()) is not None:
        future, ask = request
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(ask())
            except Exception as error:  # raised again where it was asked
                future.set_exception(error)
        del request, future, ask  # what they refer to must not live until the next one


def _answer_of(requests: "SimpleQueue[_Request | None]", ask: Callable[[], T], seconds: float) -> T:
    future: Future[T] = Future()
    requests.put((future, ask))
    # not by result(), whose TimeoutError the request may raise, too
    if not wait_awake(lambda left: bool(wait([future], timeout=left).done), max(0.0, seconds)):
        future.cancel()  # where others wait before it
        raise NoAnswerError(f"a request was not answered within {max(0.0, seconds):.1f} s")
    return future.result()
