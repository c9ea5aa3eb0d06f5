"""Ranks that started together find each other in a store that still holds what earlier ones left."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store

from bigbatch.comm.rendezvous.bounded_store import BoundedStore
from bigbatch.comm.rendezvous.meeting import meet_in_session

SECONDS = 120.0


@pytest.fixture
def store() -> Store:
    return HashStore()


def meet(store: Store, rank: int, *, world_size: int = 3, seconds: float = SECONDS) -> str:
    bounded = BoundedStore(store, seconds=SECONDS)
    return meet_in_session(bounded, rank=rank, world_size=world_size, timeout_seconds=seconds, warn_seconds=SECONDS)


def start(store: Store, pool: ThreadPoolExecutor, *ranks: int, **options: float) -> "list[Future[str]]":
    return [pool.submit(meet, store, rank, **options) for rank in ranks]


def test_session_is_one_for_all_ranks_and_another_one_after_each_restart(store: Store) -> None:
    names = []
    with ThreadPoolExecutor(3) as pool:
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            found = [future.result() for future in start(store, pool, *order)]
            assert len(set(found)) == 1
            names.append(found[0])
    assert len(set(names)) == 3


@pytest.mark.parametrize("lost", [0, 1])
def test_session_of_a_start_that_was_cut_short_takes_in_no_later_rank(lost: int, store: Store) -> None:
    """The rest of the first start ends, as its agents end it, before the second one begins."""
    left = [rank for rank in range(3) if rank != lost]
    with ThreadPoolExecutor(3) as pool:
        for future in start(store, pool, *left, seconds=0.2):
            with pytest.raises(TimeoutError, match="did not join in time"):
                future.result()
        assert len({future.result() for future in start(store, pool, 0, 1, 2)}) == 1


def test_session_of_a_later_first_rank_goes_before(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first rank that its lost agent left behind answers a rank of the next start, and is gone."""
    answered = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        (left_behind,) = start(store, pool, 0, world_size=2, seconds=0.5)
        with pytest.raises(TimeoutError, match="rank 1 did not join"):
            left_behind.result()
        bounded = BoundedStore(store, seconds=SECONDS)
        asked = bounded.append

        def answer(key: str, value: str) -> None:
            asked(key, value)
            bounded.set(f"bigbatch/answer/{value.strip()}", "left behind")
            answered.set()

        monkeypatch.setattr(bounded, "append", answer)
        joined = pool.submit(
            meet_in_session, bounded, rank=1, world_size=2, timeout_seconds=SECONDS, warn_seconds=SECONDS
        )
        assert answered.wait(SECONDS)
        (first,) = start(store, pool, 0, world_size=2)
        assert joined.result() == first.result() != "left behind"


def test_session_that_does_not_begin_names_who_is_missing(store: Store) -> None:
    with ThreadPoolExecutor(3) as pool:
        first, second = start(store, pool, 0, 2, seconds=1.0)
        with pytest.raises(TimeoutError, match=r"^ranks? 1(, 2)? did not join in time$"):
            first.result()
        with pytest.raises(TimeoutError, match=r"did not join in time$"):
            second.result()
    with pytest.raises(TimeoutError, match=r"^rank 0 did not join in time$"):
        meet(HashStore(), 1, seconds=0.1)


def test_session_names_the_ranks_that_are_late(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    bounded = BoundedStore(store, seconds=SECONDS)
    with pytest.raises(TimeoutError, match="ranks 1, 2 did not join in time"):
        meet_in_session(bounded, rank=0, world_size=3, timeout_seconds=0.4, warn_seconds=0.05)
    assert capfd.readouterr().err.startswith("bigbatch: rank 0 waits for ranks 1, 2 to start\n")
