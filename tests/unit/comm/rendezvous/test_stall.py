"""The stall inspector, look by look: two or three ranks that share a store in one process."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from queue import Queue
from threading import Event

import pytest
import torch
from error_texts import naming
from played_gpus import PlayedGpus
from torch._C._distributed_c10d import HashStore

from bigbatch.comm.backends.in_flight import StreamQueue
from bigbatch.comm.backends.mpi import meet_by_mpi
from bigbatch.comm.rendezvous import control, stall
from bigbatch.comm.rendezvous.bounded_store import BoundedStore
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.stall import Pending, StallInspector
from bigbatch.errors import PeerLostError


@pytest.fixture(autouse=True)
def recorded_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flight recorder of this process may hold what other tests did."""
    monkeypatch.setattr(stall, "dump_flight", str)


class Rank:
    """One rank's control and inspector; its thread is stopped, so that the test decides when it looks."""

    def __init__(self, rank: int, store: HashStore, *, world_size: int, ends_job: bool = False) -> None:
        self.said: list[str] = []
        self.pending: Pending | None = None
        self.control = Control(ALONE, timeout_seconds=8, find_master=meet_by_mpi)
        job = self.control
        job.rank, job.world_size, job.host = rank, world_size, f"node{rank}"
        job.store = BoundedStore(store, seconds=8)
        store.set(f"bigbatch/host/{rank}", job.host)
        self.inspector = StallInspector(
            job, lambda: self.pending, warn_seconds=4, ends_job=ends_job, say=self.said.append
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


def test_inspector_watches_what_is_done_beside_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the groups were late, and then others: each time who has not come is named anew."""
    first, second = ranks(2)
    real, passed = time.monotonic, [0.0]
    monkeypatch.setattr(stall.time, "monotonic", lambda: real() + passed[0])
    for label in ("these groups", "those groups"):
        with first.inspector.during(label):
            passed[0] += 4.5
            look(first)
            passed[0] += 2.5
            look(first, second)
        with second.inspector.during(label):
            pass
        assert re.search(naming(label, "rank 1 on node1 has not come"), first.said[-1])
    assert len(first.said) == 2


def test_inspector_looks_at_the_queue_before_what_is_done_beside_it() -> None:
    first, _ = ranks(2)
    with first.inspector.during("groups"):
        first.waits(3, seconds=9)
        look(first)
        assert first.control.store.get("bigbatch/stall/3/label").decode() == first.pending.label  # type: ignore[union-attr]
        first.pending = None
        assert first.inspector._oldest() is not None
    assert first.inspector._oldest() is None


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
    for rank, name, seconds in ((first, "rank 0 on node0", r"[78]\.\d"), (second, "rank 1 on node1", r"[345]\.\d")):
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


def end_of(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of the process, which does not end here."""
    codes: list[int] = []
    monkeypatch.setattr(stall.os, "_exit", codes.append)
    for answer in ("ROLL_CALL_SECONDS", "LINGER_SECONDS"):
        monkeypatch.setattr(control, answer, 0.2)
    rank.inspector.count()
    return codes


def test_inspector_ends_the_job_where_nothing_else_can(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    rank = Rank(0, store, world_size=2, ends_job=True)
    store.set("bigbatch/host/1", "node1")
    lost = PeerLostError("rank 0: buffer 1 failed after 9.0 s; no answer from rank 1 on node1")
    monkeypatch.setattr(rank.control, "explain", lambda label, seconds, error: lost)
    rank.waits(1, seconds=7)
    look(rank)
    assert end_of(rank, monkeypatch) == []
    rank.waits(1, seconds=9)
    look(rank)
    assert end_of(rank, monkeypatch) == [1]
    assert rank.said[-1] == str(lost)


def test_verdict_does_not_name_a_rank_that_waits_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came to the sum a second later than the first, so its own limit is still ahead."""
    first, second, late = ranks(3)
    first.waits(3, seconds=9)
    second.waits(3, seconds=7.5)
    late.waits(2, seconds=0.1)
    first.control.store.set("bigbatch/failed", "late")  # the first has called the roll
    late.pending = None  # busy elsewhere
    look(second, late)
    end_of(first, monkeypatch)
    assert naming_lost(first.said[-1]) == ["2 on node2"]


def naming_lost(text: str) -> list[str]:
    """The ranks that a verdict names."""
    found = re.search(r"no answer from rank (.*) \(control", text)
    assert found, text
    return found[1].split(", ")


class GoneStore:
    """A store whose holder has died, or hangs."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs, self.released = hangs, Event()

    def check(self, *_: object) -> bool:
        if self.hangs:
            self.released.wait(timeout=20)
        raise RuntimeError("connection closed")

    set = get = append = check


@pytest.mark.parametrize("hangs", [False, True])
def test_rank_counts_on_where_the_store_is_gone_and_says_what_it_knows(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = ranks(2)
    first.waits(3, seconds=5)
    late.waits(2, seconds=0.1)
    look(first, late)
    with monkeypatch.context() as later:
        let_time_pass(later)
        look(first, late)
    monkeypatch.setattr(stall, "ANSWER_SECONDS", 0.5)
    gone = GoneStore(hangs=hangs)
    first.control.store = BoundedStore(gone, seconds=8)  # type: ignore[arg-type]
    first.control.holder = "rank 7"
    first.waits(3, seconds=9)
    assert end_of(first, monkeypatch) == [1]
    gone.released.set()
    assert re.search(naming("rank 0", "buffer 3", "rank 7", "rendezvous", "rank 1 on node1 has not"), first.said[-1])


@pytest.mark.parametrize("hangs", [False, True])
def test_inspector_thread_ends_the_job_by_itself_when_the_store_is_gone(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In time, with rank and operation: nothing else would end it, as an NCCL kernel waits for ever."""
    ended, said = Queue[int](), list[str]()
    monkeypatch.setattr(stall.os, "_exit", ended.put)
    monkeypatch.setattr(stall, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(control, "LINGER_SECONDS", 0.0)
    job = Control(ALONE, timeout_seconds=0.2, find_master=meet_by_mpi)
    gone = GoneStore(hangs=hangs)
    job.store = BoundedStore(gone, seconds=8)  # type: ignore[arg-type]
    pending = Pending(1, "buffer 1", time.monotonic())
    inspector = StallInspector(job, lambda: pending, warn_seconds=0.04, ends_job=True, say=said.append)
    assert ended.get(timeout=5) == 1
    gone.released.set()
    inspector.close()
    assert re.search(naming("rank 0", "buffer 1", "holds the rendezvous"), said[-1])


HANGS_IN_C = """
import ctypes, time
from bigbatch.comm.backends.mpi import meet_by_mpi
from bigbatch.comm.rendezvous import stall
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ALONE

stall.VERDICT_SECONDS = 0.2
stall.dump_flight = lambda: ctypes.PyDLL(None).sleep(60)  # with the interpreter's lock held
job = Control(ALONE, timeout_seconds=0.1, find_master=meet_by_mpi)
pending = stall.Pending(1, "buffer 1", time.monotonic())
stall.StallInspector(job, lambda: pending, warn_seconds=0.04, ends_job=True)
time.sleep(30)
"""


@pytest.mark.slow
def test_inspector_ends_the_job_where_the_flight_recorder_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_IN_C], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "Timeout" in done.stderr, "by the watch that needs no lock, which shows where each thread is"


def test_inspector_is_silent_where_the_store_goes_first_at_the_end_of_a_run() -> None:
    said: list[str] = []
    job = Control(ALONE, timeout_seconds=8, find_master=meet_by_mpi)
    job.store = BoundedStore(GoneStore(), seconds=8)  # type: ignore[arg-type]
    inspector = StallInspector(job, lambda: None, warn_seconds=0.04, ends_job=True, say=said.append)
    time.sleep(0.1)
    assert all(thread.is_alive() for thread in inspector._threads)  # an operation may still come
    inspector.close()
    assert not any(thread.is_alive() for thread in inspector._threads)
    assert said == []


def test_replay_of_a_graph_is_watched_where_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    PlayedGpus(1, monkeypatch=monkeypatch)
    queue = StreamQueue(torch.device("cuda", 0))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda tensor, *_, **__: tensor)  # the GPU comes to nothing
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        queue.submit(lambda: None, label="captured, not run")
    assert queue.oldest() is None
    queue.submit(lambda: None, label="the sums of a replayed step")
    (rank, _) = ranks(2)
    rank.inspector._oldest = queue.oldest
    rank.control.store = BoundedStore(GoneStore(), seconds=8)  # type: ignore[arg-type]
    real = time.monotonic
    monkeypatch.setattr(stall.time, "monotonic", lambda: real() + 9)
    assert end_of(rank, monkeypatch) == [1]
    assert "the sums of a replayed step" in rank.said[-1]


def recorded(*numbers: int) -> str:
    """A dump of torch's flight recorder, in which the last collective has not ended."""
    entries = [
        {
            "collective_seq_id": number,
            "is_p2p": False,
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "retired": False,
            "state": "started" if number == numbers[-1] else "completed",
        }
        for number in numbers
    ]
    return json.dumps({"pg_config": {"0": {"ranks": "[0, 1, 2]"}}, "entries": entries})


def test_verdict_names_the_ranks_that_have_not_begun_the_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 runs and is busy elsewhere, one collective behind; rank 2 is gone."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/trace_")
    store = HashStore()
    first, behind, _ = (Rank(rank, store, world_size=3, ends_job=True) for rank in range(3))
    first.waits(3, seconds=9)
    store.set("bigbatch/failed", "late")  # the first has called the roll
    monkeypatch.setattr(stall, "dump_flight", lambda: recorded(40, 41))
    look(behind)
    mine = recorded(40, 41, 42)
    monkeypatch.setattr(stall, "dump_flight", lambda: mine)
    assert end_of(first, monkeypatch) == [1]
    parts = "collective 42 (nccl:all_reduce)", "rank 1 has begun 41", "rank 2 does not tell", tmp_path / "trace_0.json"
    assert re.search(naming("no answer from rank 1 on node1", *parts), first.said[-1]), first.said[-1]
    assert (tmp_path / "trace_0.json").read_text() == mine


@pytest.mark.parametrize("text", ["", "no JSON", "{}"])
def test_verdict_comes_whatever_the_recorder_holds(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/no-such-folder/trace_")
    monkeypatch.setattr(stall, "dump_flight", lambda: text)
    store = HashStore()
    first, _ = (Rank(rank, store, world_size=2, ends_job=True) for rank in range(2))
    first.waits(3, seconds=9)
    assert end_of(first, monkeypatch) == [1]
    assert naming_lost(first.said[-1]) == ["1 on node1"]


def test_recorder_that_hangs_delays_the_end_no_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = Event()
    monkeypatch.setattr(stall, "FLIGHT_SECONDS", 0.1)
    monkeypatch.setattr(stall, "dump_flight", lambda: "" if hangs.wait(timeout=20) else "late")
    first, _ = ranks(2)
    first.waits(3, seconds=9)
    assert end_of(first, monkeypatch) == [1]
    hangs.set()
    assert naming_lost(first.said[-1]) == ["1 on node1"]


def test_verdict_has_time_for_all_that_it_takes() -> None:
    parts = stall.LOOK_SECONDS, stall.FLIGHT_SECONDS, control.ROLL_CALL_SECONDS, control.LINGER_SECONDS
    assert sum(parts) < stall.VERDICT_SECONDS
