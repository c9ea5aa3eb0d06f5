"""Ranks at different speeds stop at the same boundary, which no rank had passed when all knew of the stop."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from bigbatch.comm.rendezvous.departure import Departure


def departures(num_ranks: int) -> list[Departure]:
    """Those of ranks that share a store."""
    store = HashStore()

    def read(key: str, *, what: str) -> str:
        while not store.check([key]):
            time.sleep(0.0001)
        return str(store.get(key).decode())

    control: Any = SimpleNamespace(store=store, world_size=num_ranks, next_key=lambda: "key", read=read)
    return [Departure(control) for _ in range(num_ranks)]


def test_departure_is_at_the_first_boundary_that_no_rank_has_passed() -> None:
    first, second, third = departures(3)
    assert not any(each.is_due() for each in (first, second, third, second, second))
    assert not first.poll()
    third.ask()
    assert all(each.poll() for each in (first, third, second, second))
    # they had passed 1, 3 and 1
    assert [first.is_due() for _ in range(3)] == [False, False, True]
    assert second.is_due()
    assert [third.is_due() for _ in range(4)] == [False, False, True, True]


def test_departure_goes_on_until_this_rank_has_told() -> None:
    first, second = departures(2)
    first.ask()
    assert not any(second.is_due() for _ in range(9))
    assert first.poll()
    assert second.poll()
    assert [first.is_due() for _ in range(10)] == [False] * 9 + [True]


def test_departure_for_a_join_waits_until_all_look_often() -> None:
    """A rank that has told waits at its next boundary, and would do so until the next look of the others."""
    first, second = departures(2)
    first.ask(joins=True)
    assert not first.poll()
    assert first.is_near
    assert not any(first.is_due() for _ in range(3))
    assert second.poll(), "the last one need not wait"
    assert first.poll()
    assert not first.is_agreed(), "to stop"
    assert first.is_due()
    assert [second.is_due() for _ in range(4)] == [False] * 3 + [True]
    assert first.is_join
    assert second.is_join


def test_departure_is_a_stop_if_both_are_asked_for_in_time() -> None:
    first, second = departures(2)
    first.ask(joins=True)
    assert not first.poll()
    second.ask()
    assert second.poll()
    assert first.poll()
    assert first.is_due()
    assert first.is_agreed()
    assert not first.is_join


@pytest.mark.parametrize("seed", range(5))
def test_departure_of_ranks_that_run_ahead_of_each_other(seed: int) -> None:
    draw = random.Random(seed)
    ranks = departures(4)
    asker = draw.randrange(4)
    pauses = [draw.uniform(0, 0.002) for _ in ranks]
    ended = Event()

    def work(rank: int) -> int:
        for boundary in range(1, 10_000):
            time.sleep(pauses[rank])
            if ranks[rank].is_due():
                return boundary
            if rank == asker and boundary == 5:
                ranks[rank].ask()
        raise AssertionError("never left")

    def listen(rank: int) -> None:
        while not ended.wait(0.003) and not ranks[rank].poll():
            pass

    with ThreadPoolExecutor(8) as pool:
        for rank in range(4):
            pool.submit(listen, rank)
        left = [each.result(timeout=200) for each in [pool.submit(work, rank) for rank in range(4)]]
        ended.set()
    assert len(set(left)) == 1
    assert left[0] >= 6
