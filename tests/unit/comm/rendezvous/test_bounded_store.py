"""Requests to a store whose holder is stopped, or gone: each ends, and says which of the two it was."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, active_count

import pytest
from lost_stores import GoneStore, StoppedStore
from torch.distributed import HashStore

from bigbatch.comm.rendezvous.bounded_store import BoundedStore, NoAnswerError, answer_within


@pytest.fixture
def stopped() -> Iterator[StoppedStore]:
    """Continues at the end, so that no thread is left."""
    store = StoppedStore()
    yield store
    store.goes_on.set()


def test_bounded_store_answers_as_torchs_own() -> None:
    store = BoundedStore(HashStore(), seconds=60)
    assert not store.check(["key"])
    store.set("key", "text")
    store.set("bytes", b"\0")
    assert store.check(["key", "bytes"])
    assert (store.get("key"), store.get("bytes")) == (b"text", b"\0")
    assert [store.add("count", 2), store.add("count", 3)] == [2, 5]
    store.append("list", "a ")
    store.append("list", "b ")
    assert store.get("list") == b"a b "


def test_bounded_store_tells_whether_a_key_came_in_time() -> None:
    store = BoundedStore(HashStore(), seconds=60)
    assert not store.wait_for("key", seconds=0.05)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(store.wait_for, "key", seconds=60)
        store.set("key", "value")
        assert wait.result()


def test_bounded_store_gives_up_a_holder_that_is_stopped(stopped: StoppedStore) -> None:
    store = BoundedStore(stopped, seconds=0.1)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(NoAnswerError, match=r"not answered within 0\.1 s"):
            store.check(["key"])
    assert 0.2 <= time.monotonic() - start < 30


def test_bounded_stores_view_has_one_limit_for_all_that_it_asks(stopped: StoppedStore) -> None:
    store = BoundedStore(stopped, seconds=60)
    start = time.monotonic()
    view = store.within(60).within(0.2)
    for _ in range(50):
        with pytest.raises(NoAnswerError):
            view.check(["key"])
    assert 0.2 <= time.monotonic() - start < 30  # of 50 limits, and of 60 s


def test_bounded_store_raises_what_a_store_raises_that_is_gone() -> None:
    with pytest.raises(RuntimeError, match="connection reset") as caught:
        BoundedStore(GoneStore(), seconds=60).check(["key"])
    assert not isinstance(caught.value, NoAnswerError)


def test_answer_within_returns_or_raises_what_was_asked() -> None:
    assert answer_within(60, lambda: 7) == 7
    with pytest.raises(TimeoutError, match="of its own"):  # not taken for ours
        answer_within(60, lambda: (_ for _ in ()).throw(TimeoutError("of its own")))
    forever = Event()
    with pytest.raises(NoAnswerError):
        answer_within(0.05, lambda: forever.wait(timeout=60))
    forever.set()


def test_holder_that_stands_still_costs_one_thread(stopped: StoppedStore) -> None:
    store = BoundedStore(stopped, seconds=0.02)
    before = active_count()
    for _ in range(5):
        with pytest.raises(NoAnswerError):
            store.within(0.01).check(["a"])
    assert active_count() <= before + 1
    stopped.goes_on.set()
    assert not BoundedStore(stopped, seconds=60).check(["a"])
