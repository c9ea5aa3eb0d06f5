"""The stall inspector, look by look: two or three ranks that share a store in one process."""

import re
import time

import pytest
from torch._C._distributed_c10d import HashStore

from bigbatch.comm.backends.mpi import meet_by_mpi
from bigbatch.comm.rendezvous import stall
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.stall import Pending, StallInspector
from bigbatch.errors import PeerLostError


class Rank:
    """One rank's control and inspector; its thread is stopped, so that the test decides when it looks."""

    def __init__(self, rank: int, store: HashStore, *, world_size: int, ends_job: bool = False) -> None:
        self.said: list[str] = []
        self.pending: Pending | None = None
        control = Control(ALONE, timeout_seconds=8, find_master=meet_by_mpi)
        control.rank, control.world_size, control.host, control.store = rank, world_size, f"node{rank}", store
        store.set(f"bigbatch/host/{rank}", control.host)
        self.inspector = StallInspector(
            control, lambda: self.pending, warn_seconds=4, ends_job=ends_job, say=self.said.append
        )
        self.inspector.close()

    def waits(self, number: int, *, seconds: float, group: tuple[int, ...] | None = None) -> None:
        """This rank has waited so long in an operation."""
        self.pending = Pending(
            number, f"all-reduce of buffer {number} (fc.weight and 3 more)", time.monotonic() - seconds, group
        )


def ranks(count: int) -> list[Rank]:
    store = HashStore()
    return [Rank(rank, store, world_size=count) for rank in range(count)]


def look(*several: Rank) -> None:
    for rank in several:
        rank.inspector.look()


def let_time_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """So long that the others have had the time to write down that they wait."""
    real = time.monotonic
    monkeypatch.setattr(stall.time, "monotonic", lambda: real() + 2.5)


def test_inspector_says_nothing_while_nobody_waits_long() -> None:
    first, second = ranks(2)
    first.waits(3, seconds=3.9)
    for _ in range(3):
        look(first, second)
    assert first.said == second.said == []


def test_late_rank_is_named_by_all_others_and_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, late = ranks(3)
    first.waits(3, seconds=5)
    second.waits(3, seconds=0.5)  # came later, and waits as well
    late.waits(2, seconds=0.1)
    look(first, second, late)
    assert first.said == []  # the others get the time to write down that they wait, too
    let_time_pass(monkeypatch)
    for _ in range(3):
        look(first, second, late)
    what = r"all-reduce of buffer 3 \(fc.weight and 3 more\)"
    assert len(first.said) == len(second.said) == len(late.said) == 1  # once
    for rank, name, seconds in ((first, "rank 0 on node0", r"7\.5"), (second, "rank 1 on node1", r"3\.0")):
        assert_matches(rank.said[0], rf"{name} has waited {seconds} s in {what}: rank 2 on node2 has not come to it")
    assert first.said[0].endswith("(the job ends after 8 s)")
    assert_matches(late.said[0], rf"rank 2 on node2 is late: other ranks wait for it in {what}")


def assert_matches(text: str, pattern: str) -> None:
    assert re.match(pattern, text), text


def test_inspector_blames_nobody_where_all_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ranks(2)
    for rank in both:
        rank.waits(1, seconds=5)
    look(*both)
    let_time_pass(monkeypatch)
    look(*both)
    assert all(": all ranks are in it (the job" in rank.said[0] for rank in both)


def test_rank_that_has_passed_the_operation_is_not_late() -> None:
    first, second = ranks(2)
    first.waits(1, seconds=5)
    second.waits(1, seconds=5)
    look(first, second)
    second.pending = None  # through already
    look(second)
    second.waits(2, seconds=0.1)
    look(second)
    assert second.said == []


def test_group_has_nobody_late_for_it_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 are in it, of which 1 is late; 2 and 3 have one of their own, and have not come so far either."""
    first, late, third, fourth = ranks(4)
    first.waits(3, seconds=5, group=(0, 1))
    late.waits(2, seconds=0.1)
    fourth.waits(2, seconds=0.1)
    look(first, late, third, fourth)
    let_time_pass(monkeypatch)
    look(first, late, third, fourth)
    assert ": rank 1 on node1 has not come to it (the job" in first.said[0]
    assert_matches(late.said[0], "rank 1 on node1 is late")
    assert third.said == fourth.said == []


def test_two_groups_that_wait_at_once_name_the_late_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank counts its own operations, so that both groups wait in their third."""
    first, second, third, fourth = ranks(4)
    first.waits(3, seconds=5, group=(0, 1))
    third.waits(3, seconds=4.5, group=(2, 3))
    second.waits(2, seconds=0.1)
    fourth.waits(2, seconds=0.1)
    look(first, second, third, fourth)
    let_time_pass(monkeypatch)
    look(first, second, third, fourth)
    assert ": rank 1 on node1 has not come to it (the job" in first.said[0]
    assert ": rank 3 on node3 has not come to it (the job" in third.said[0]
    assert_matches(second.said[0], "rank 1 on node1 is late")
    assert_matches(fourth.said[0], "rank 3 on node3 is late")


def test_inspector_ends_the_job_where_nothing_else_can(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    rank = Rank(0, store, world_size=2, ends_job=True)
    store.set("bigbatch/host/1", "node1")
    codes: list[int] = []
    monkeypatch.setattr(stall.os, "_exit", codes.append)
    lost = PeerLostError("rank 0: buffer 1 failed after 9.0 s; no answer from rank 1 on node1")
    monkeypatch.setattr(rank.inspector._control, "explain", lambda label, seconds, error: lost)
    rank.waits(1, seconds=7)
    look(rank)
    assert codes == []
    rank.waits(1, seconds=9)
    look(rank)
    assert codes == [1]
    assert rank.said[-1] == str(lost)


def test_inspector_thread_looks_by_itself_and_survives_a_store_that_is_gone() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection closed")

    control = Control(ALONE, timeout_seconds=8, find_master=meet_by_mpi)
    control.store = Gone()
    inspector = StallInspector(control, lambda: None, warn_seconds=0.04)
    inspector._thread.join(timeout=5)
    assert not inspector._thread.is_alive()
