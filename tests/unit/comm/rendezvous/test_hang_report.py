"""What the watch says at the end of a job that nothing else ends: verdict and flights, store or no store."""

import json
import re
import signal
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Event

import pytest
import torch
from benchmark_process import fork_code
from error_texts import naming
from lost_stores import GoneStore, StoppedStore
from played_flights import play
from played_gpus import PlayedGpus
from silent_ranks import hurry_count
from stalled_ranks import Rank, let_time_pass, look, ranks
from torch._C._distributed_c10d import HashStore

from bigbatch.awake import awake_seconds
from bigbatch.comm.backends.in_flight import StreamQueue
from bigbatch.comm.rendezvous import control, hang_report, limits, watch
from bigbatch.comm.rendezvous.bounded_store import BoundedStore
from bigbatch.comm.rendezvous.control import Pending
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.failure_log import LOG
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.watch import Watch
from bigbatch.errors import FAILED, LOST
from bigbatch.launch.jobs.restarts import may_restart


def recorded(number: int) -> str:
    """A dump of torch's flight recorder, in which the collective of this number is the first that has not ended."""
    rank, *_ = play(3)
    return json.dumps(rank.call(times=number - 1).call(state="started").dump())


@pytest.fixture(autouse=True)
def recorded_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flight recorder of this process may hold what other tests did."""
    monkeypatch.setattr(hang_report, "dump_flight", str)


def end_of(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of the process, which does not end here."""
    codes: list[int] = []
    monkeypatch.setattr(watch.os, "_exit", codes.append)
    hurry_count(monkeypatch)
    rank.watch.check_clock()
    return codes


def naming_lost(text: str) -> list[str]:
    """The ranks that a verdict names."""
    found = re.search(r"no answer from rank (.*) \(control", text)
    assert found, text
    return found[1].split(", ")


@pytest.mark.parametrize("hangs", [False, True])
def test_rank_counts_on_where_the_store_is_gone_and_says_what_it_knows(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = ranks(2, ends_job=True)
    first.waits(3, seconds=5)
    late.waits(2, seconds=0.1)
    look(first, late)
    with monkeypatch.context() as later:
        let_time_pass(later)
        look(first, late)
    monkeypatch.setattr(limits, "EXPLAIN_SECONDS", 0.5)
    lost = StoppedStore() if hangs else GoneStore()
    first.control.store = BoundedStore(lost, seconds=8)
    first.control.holder = "rank 7"
    first.waits(3, seconds=9)
    assert end_of(first, monkeypatch) == [LOST]
    if hangs:
        lost.goes_on.set()  # type: ignore[attr-defined]
    assert re.search(
        naming("rank 0", "buffer 3", "rank 7", "key-value store", "rank 1 on node1 has not"), first.said[-1]
    )


@pytest.mark.parametrize(("crashed", "code"), [('["crashed", 1, null]', LOST), (f'["crashed", 1, {FAILED}]', FAILED)])
def test_rank_whose_main_thread_waits_for_the_gpu_ends_soon_after_another_rank(
    crashed: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only after comm.timeout_seconds; but a checkpoint that it is writing may be finished."""
    first, _ = ranks(2, ends_job=True)
    first.waits(3, seconds=0.1)
    first.control.store.append(LOG, f"{crashed}\n")
    look(first)
    assert end_of(first, monkeypatch) == []
    assert re.search(naming("rank 0", "buffer 3", "another rank reports a failure"), first.said[-1])
    monkeypatch.setattr(limits, "LEAVE_SECONDS", -1.0)
    assert end_of(first, monkeypatch) == [code]
    assert re.search(naming("rank 0", "buffer 3", "rank 1"), first.said[-1]), first.said


def test_watch_leaves_a_loss_to_the_thread_that_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = ranks(2, ends_job=True)
    first.control.detector.heals = True
    first.waits(3, seconds=0.1)
    first.control.store.append(LOG, '["crashed", 1, null]\n')
    look(first)
    monkeypatch.setattr(limits, "LEAVE_SECONDS", -1.0)
    assert end_of(first, monkeypatch) == []


@pytest.mark.parametrize("hangs", [False, True])
def test_watch_thread_ends_the_job_by_itself_when_the_store_is_gone(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In time, with rank and operation: nothing else would end it, as an NCCL kernel waits for ever."""
    ended, said = Queue[int](), list[str]()
    monkeypatch.setattr(watch.os, "_exit", ended.put)
    monkeypatch.setattr(limits, "EXPLAIN_SECONDS", 0.2)
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.0)
    job = JobControl(ALONE, timeout_seconds=60, warn_seconds=0.04)
    job.timeout_seconds = 0.2
    lost = StoppedStore() if hangs else GoneStore()
    job.store = BoundedStore(lost, seconds=8)
    pending = Pending(1, "buffer 1", awake_seconds())
    watched = Watch(job, lambda: pending, ends_job=True, say=said.append)
    assert ended.get(timeout=200) == LOST
    if hangs:
        lost.goes_on.set()  # type: ignore[attr-defined]
    watched.close()
    assert re.search(naming("rank 0", "buffer 1", "key-value store"), said[-1])


HANGS_IN_C = """
import ctypes, signal, time
from bigbatch.comm.rendezvous import hang_report, limits, watch
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.environ import ALONE

signal.signal(signal.SIGALRM, lambda *_: None)  # which no longer runs
limits.VERDICT_SECONDS = 0.2
hang_report.dump_flight = lambda: ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock held
job = JobControl(ALONE, timeout_seconds=60, warn_seconds=0.04)
job.timeout_seconds = 0.1
pending = watch.Pending(1, "buffer 1", watch.awake_seconds())
watch.Watch(job, lambda: pending, ends_job=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_watch_ends_the_job_where_the_flight_recorder_hangs(tmp_path: Path) -> None:
    code, output = fork_code(HANGS_IN_C, cwd=tmp_path, timeout_seconds=250)
    assert code == -signal.SIGALRM, output
    assert may_restart(128 + signal.SIGALRM, is_python=False), "it needs no repair first"
    assert "hang_report" in output, "where each thread is"


def test_watch_is_silent_where_the_store_goes_first_at_the_end_of_a_run() -> None:
    said: list[str] = []
    job = JobControl(ALONE, timeout_seconds=60, warn_seconds=0.04)
    job.store = BoundedStore(GoneStore(), seconds=8)
    watched = Watch(job, lambda: None, ends_job=True, say=said.append)
    time.sleep(0.1)
    assert all(thread.is_alive() for thread in watched._threads)  # an operation may still come
    watched.close()
    assert not any(thread.is_alive() for thread in watched._threads)
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
    (rank, _) = ranks(2, ends_job=True)
    rank.watch._oldest = queue.oldest
    rank.control.store = BoundedStore(GoneStore(), seconds=8)
    for module in (watch, control):
        monkeypatch.setattr(module, "awake_seconds", lambda: awake_seconds() + 9)
    assert end_of(rank, monkeypatch) == [LOST]
    assert "the sums of a replayed step" in rank.said[-1]


def test_verdict_names_the_ranks_that_have_not_begun_the_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 runs and is busy elsewhere, one collective behind; rank 2 is gone."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/trace_")
    first, behind, _ = ranks(3, ends_job=True)
    first.waits(3, seconds=9)
    first.control.store.append(LOG, '["failed", 0, "late"]\n')  # the first has called the roll
    monkeypatch.setattr(hang_report, "dump_flight", lambda: recorded(41))
    look(behind)
    mine = recorded(42)
    monkeypatch.setattr(hang_report, "dump_flight", lambda: mine)
    assert end_of(first, monkeypatch) == [LOST]
    parts = "collective 42 (nccl:all_reduce)", "rank 1 has begun 41", "rank 2 did not answer", tmp_path / "trace_0.json"
    assert re.search(naming("no answer from rank 1 on node1", *parts), first.said[-1]), first.said[-1]
    assert (tmp_path / "trace_0.json").read_text() == mine


class LeavingStore(HashStore):
    """A store that ends with the process of the rank that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_gone = Event()

    def check(self, keys: list[str]) -> bool:
        if self.is_gone.is_set():
            raise RuntimeError("connection closed")
        return super().check(keys)


@pytest.mark.slow
def test_holder_stays_until_the_others_know_verdict_and_flights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/trace_")
    monkeypatch.setattr(hang_report, "dump_flight", lambda: recorded(41))
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.1)
    for limit in ("EXPLAIN_SECONDS", "FLIGHT_SECONDS", "VERDICT_SECONDS"):
        monkeypatch.setattr(limits, limit, 60.0)  # longer than any wait of a slow machine
    monkeypatch.setattr(limits, "ROLL_CALL_SECONDS", 60.0)
    monkeypatch.setattr(watch.os, "_exit", lambda code: None)
    store = LeavingStore()
    holder, other = (Rank(rank, store, world_size=2, ends_job=True) for rank in range(2))
    for rank in (holder, other):
        rank.waits(3, seconds=9)

    def end_of_holder() -> None:
        holder.watch.check_clock()
        store.is_gone.set()

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(end_of_holder), pool.submit(other.watch.check_clock)]
    assert [each.result() for each in ended] == [None, None]
    for rank in (holder, other):
        assert re.search(naming("all ranks still answer", "waits in collective 41"), rank.said[-1]), rank.said[-1]


def test_rank_whose_recorder_hangs_answers_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be named with the one that is lost, although it waits in the same sum."""
    hangs = Event()
    monkeypatch.setattr(limits, "FLIGHT_SECONDS", 0.1)
    monkeypatch.setattr(hang_report, "dump_flight", lambda: "" if hangs.wait(timeout=200) else "late")
    first, second, _ = ranks(3, ends_job=True)
    for rank in (first, second):
        rank.waits(3, seconds=9)
    first.control.store.append(LOG, '["failed", 0, "late"]\n')  # the first has called the roll
    with ThreadPoolExecutor(1) as pool:
        looks = pool.submit(second.watch.look)
        futures.wait([looks], timeout=200)
        assert end_of(first, monkeypatch) == [LOST]
        hangs.set()
        looks.result()
    assert naming_lost(first.said[-1]) == ["2 on node2"]


@pytest.mark.parametrize("text", ["", "no JSON", "{}"])
def test_verdict_comes_whatever_the_recorder_holds(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/no-such-folder/trace_")
    monkeypatch.setattr(hang_report, "dump_flight", lambda: text)
    first, _ = ranks(2, ends_job=True)
    first.waits(3, seconds=1)
    assert end_of(first, monkeypatch) == []
    first.waits(3, seconds=9)
    assert end_of(first, monkeypatch) == [LOST]
    assert naming_lost(first.said[-1]) == ["1 on node1"]
