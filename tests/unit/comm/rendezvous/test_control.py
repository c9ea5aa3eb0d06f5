"""The control channel without its peers: rendezvous, comparisons that a rank misses, and the failure detector."""

import copy
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from error_texts import naming
from lost_stores import StoppedStore
from silent_ranks import half_a_job, hurry_count
from thread_controls import on_ranks
from torch.distributed import HashStore, TCPStore

from bigbatch.comm.rendezvous import job_control, limits, meeting
from bigbatch.comm.rendezvous.bounded_store import BoundedStore, News, NoAnswerError
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv
from bigbatch.comm.rendezvous.failure_detector import FailureDetector, late_error
from bigbatch.comm.rendezvous.job_control import PIECE_BYTES, WHOLE_BYTES, JobControl
from bigbatch.comm.rendezvous.job_store import JobStore, StoreConnections, start_store
from bigbatch.comm.rendezvous.meeting import listen
from bigbatch.comm.rendezvous.places import meet
from bigbatch.errors import CRASHED, FAILED, LOST, CommError, PeerLostError, first_line


def rank_of_two(*, port: int = 0, address: str = "127.0.0.1") -> ProcessEnv:
    """Rank 0 of two on one host."""
    return ProcessEnv("torchrun", 0, 2, 0, 2, "here", (address, port), secret=b"of this job")


def rendezvous(env: ProcessEnv, *, timeout_seconds: float) -> StoreConnections:
    return meeting.rendezvous(env, timeout_seconds=timeout_seconds, warn_seconds=60)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank will answer: do not wait for it."""
    hurry_count(monkeypatch)
    monkeypatch.setattr(meeting, "_met", {})


# --- texts and failures ---


@contextmanager
def whole_job(world_size: int) -> Iterator[list[JobControl]]:
    """Controls of all ranks, on one store."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    first = start_store(listener, b"secret", world_size=world_size, timeout_seconds=60)
    others = [StoreConnections("127.0.0.1", port, b"secret", rank=k, timeout_seconds=60) for k in range(1, world_size)]
    yield [
        JobControl(
            replace(ALONE, rank=rank, world_size=world_size, host=f"n{rank}"),
            timeout_seconds=60,
            joined=(JobStore(each, seconds=60), 0),
        )
        for rank, each in enumerate([first, *others])
    ]
    for each in (*others, first):
        each.close()


@pytest.mark.parametrize("length", [0, WHOLE_BYTES - 1, WHOLE_BYTES, PIECE_BYTES + 1])
def test_texts_of_any_length_are_exchanged_in_few_requests_and_leave_nothing(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store answers thousands of ranks one after the other, and in a job of days it keeps what it has."""
    requests: list[StoreConnections] = []
    keys: set[str] = set()
    ask = StoreConnections.ask

    def counted(self: StoreConnections, name: str, *told: Any, **how: Any) -> bytes:
        if name != "wait":  # of these there are more on a busy machine
            requests.append(self)
        if name == "set":
            keys.update(told[::2])
        elif name == "delete":
            keys.difference_update(told)
        return ask(self, name, *told, **how)

    monkeypatch.setattr(StoreConnections, "ask", counted)
    with whole_job(5) as controls, ThreadPoolExecutor(5) as ranks:
        requests.clear()
        keys.clear()
        texts = [f"{rank}{'ä' * (length // 2)}" for rank in range(5)]
        gathered = list(ranks.map(lambda rank: controls[rank].gather_text(texts[rank]), range(5)))
        assert gathered == [texts] * 5
        if length < WHOLE_BYTES // 5:
            counts = [requests.count(each.store.connections) for each in controls]  # type: ignore[union-attr]
            assert counts == [4, 3, 3, 3, 3]
        collected = list(ranks.map(lambda rank: controls[rank].collect_text(texts[rank], what="texts"), range(5)))
        assert collected == [texts, [], [], [], []]
        assert keys == set()


def test_gather_text_ends_at_once_where_the_process_of_a_rank_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_control, "PEER_CHECK_SECONDS", 0.1)
    job = half_a_job(rank_of_two(), 60)
    assert isinstance(job.store, JobStore)
    check_peers, waited = job.detector.check_peers, []
    monkeypatch.setattr(
        job.detector, "check_peers", lambda *told: (waited.append(job.detector.is_waiting), check_peers(*told))
    )
    killed = StoreConnections("127.0.0.1", job.store.connections.port, job.secret, rank=1, timeout_seconds=60)
    killed.close()
    said = naming("comparison", "rank 1 on node1", "the process of rank 1 on node1 has ended")
    with pytest.raises(PeerLostError, match=said) as caught:
        job.gather_text("seed: 1")
    assert float(re.findall(r"after (\d+\.\d) s", str(caught.value))[0]) < 30
    assert waited
    assert all(waited)  # so this rank answers a roll call
    assert not job.detector.is_waiting


def test_last_text_of_a_rank_whose_process_has_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_control, "PEER_CHECK_SECONDS", 0.05)
    job = half_a_job(rank_of_two(), 60)

    tail = JobStore.tail

    def write_and_end(store: JobStore, *where: Any, **how: Any) -> News:
        store.set("bigbatch/text/1/1", "=seed: 2")
        return News(tail(store, *where, **how).text, frozenset({1}))

    monkeypatch.setattr(JobStore, "tail", write_and_end)
    assert job.collect_text("seed: 1", what="seeds") == ["seed: 1", "seed: 2"]


def test_exchange_that_takes_too_long_names_the_ranks_that_did_not_begin_it() -> None:
    """They answer, as a rank does whose main thread hangs."""
    job = half_a_job(rank_of_two(), 60)
    job.world_size = 4
    job.store.set("key/1", "1")
    assert job._late_ranks(["key"], [0]) == [2, 3]
    assert job._late_ranks(["key/1", "key/2", "key/3"], [1, 2, 3]) == [2, 3]
    job.store.multi_set(["key/2", "key/3"], ["1", "1"])
    assert job._late_ranks(["key"], [0]) == [0]
    assert job._late_ranks(["told to all"], [0]) == [0]
    assert job._late_ranks(["by any"], []) == []
    assert str(late_error([2, 3])) == "timed out: ranks 2, 3 did not begin this operation"
    assert str(late_error()) == "timed out: not all ranks finished this operation"


def test_give_up_ends_a_wait_after_the_time_limit_of_the_connection_and_not_before() -> None:
    job = half_a_job(rank_of_two(), 3.0)
    job.detector.raise_if_failed("buffer 0", 2.9)
    with pytest.raises(PeerLostError, match=naming("buffer 0", "3.1 s", "rank 1 on node1", "control")):
        job.detector.raise_if_failed("buffer 0", 3.1)


@pytest.mark.parametrize("answers", [False, True])
def test_wait_for_a_rank_that_has_left_before_ends_at_once(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry_count(monkeypatch)
    job = half_a_job(rank_of_two(), 5.0)
    other = copy.copy(job)
    other.rank = 1
    other.detector = FailureDetector(other)
    for each in (job, other):
        each.detector.begin()
    other.detector.publish_departure()
    job.detector.check_peers("buffer 0", 1.0)  # which the other has begun, too
    job.detector.begin()
    if answers:  # its process has not ended yet
        other.detector.log.write("alive")
    with pytest.raises(PeerLostError, match=naming("buffer 1", "1.0 s", "rank 1 on node1 ended")) as caught:
        job.detector.check_peers("buffer 1", 1.0)
    assert ("do all ranks make the same number of steps?" in str(caught.value)) == answers
    assert "all ranks still answer" not in str(caught.value)


def test_failure_that_the_queue_of_sums_reports_ends_an_exchange_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the queue and the main thread wait at the same time: the one for a sum, the other for texts."""
    monkeypatch.setattr(job_control, "PEER_CHECK_SECONDS", 0.1)
    job = half_a_job(rank_of_two(), 60)
    with ThreadPoolExecutor(1) as queue:
        reported = queue.submit(job.detector.make_error, "buffer 0", 1.0, RuntimeError("Connection closed by peer"))
        with pytest.raises(PeerLostError, match=naming("comparison of a text", "rank 1 on node1")) as caught:
            job.gather_text("seed: 1")
    assert float(re.findall(r"after (\d+\.\d) s", str(caught.value))[0]) < 30
    assert caught.value.lost_ranks == reported.result().lost_ranks == {1}
    job.detector.check_peers("buffer 1", 1.0)  # in the queue itself: its error tells more


@pytest.mark.parametrize(("code", "expected"), [(FAILED, FAILED), (CRASHED, LOST)])
def test_rank_that_a_user_must_help_is_no_lost_rank_to_the_others(
    code: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the job would be started again, and fail again."""
    hurry_count(monkeypatch)
    job = half_a_job(rank_of_two(), 5.0)
    other = copy.copy(job)
    other.rank = 1
    other.detector = FailureDetector(other)
    job.detector.publish_crash(code)
    with pytest.raises(PeerLostError) as raised:
        other.detector.check_peers("buffer 0", 1.0)
    assert raised.value.exit_code == expected


@pytest.fixture
def job_of_stopped() -> Iterator[JobControl]:
    """Rank 1, whose store's holder is stopped."""
    job, store = half_a_job(rank_of_two(), 60), StoppedStore()
    job.rank, job.store = 1, BoundedStore(store, seconds=0.1)
    yield job
    store.goes_on.set()  # no thread is left


@pytest.mark.parametrize(
    "ask",
    [
        lambda job, what: job.gather_text("seed: 1", what=what),
        lambda job, what: job.tell_all("", what=what, timeout_seconds=60),
        lambda job, what: job.read("key", what=what),
    ],
)
def test_rendezvous_that_is_stopped_is_named_by_who_waits_for_its_answer(
    ask: Callable[[JobControl, str], object], job_of_stopped: JobControl
) -> None:
    with pytest.raises(PeerLostError, match=naming("rank 1: comparison", "key-value store, which runs beside rank 0")):
        ask(job_of_stopped, "comparison")


def test_rendezvous_that_is_stopped_ends_what_torch_asks_it_itself(
    job_of_stopped: JobControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's connection asks the store itself, and its own limit needs the store's answer."""
    job, store = job_of_stopped, job_of_stopped.store.torch_store
    monkeypatch.setattr(limits, "GRACE_SECONDS", 0.0)
    job.timeout_seconds = 0.1
    with pytest.raises(PeerLostError, match=naming("rank 1: connection", "key-value store, which runs beside rank 0")):
        job.detector.bounded("connection", lambda: store.check(["key"]))
    assert job.detector.bounded("connection", lambda: 7) == 7


def test_rank_that_fails_leaves_though_the_rendezvous_is_stopped(
    job_of_stopped: JobControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoAnswerError):  # abort() has no other rank to tell
        job_of_stopped.detector.publish_crash()


def test_first_line_of_an_error() -> None:
    gloo = "[../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:4321\nat x"
    assert first_line(RuntimeError(gloo)) == "Connection closed by peer [127.0.0.1]:4321"
    assert first_line(RuntimeError("[rank 1] lost")) == "[rank 1] lost"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(SystemExit(3)) == "SystemExit 3"


# --- the rendezvous ---


def listening_addresses() -> dict[int, str]:
    """Port -> address in hexadecimal of all IPv4 sockets of this machine that listen."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(port, 16): ip for ip, port in (line[1].split(":") for line in lines if line[3] == "0A")}


needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc/net/tcp")
LOOPBACK, ANY = "0100007F", "00000000"


@needs_proc
@pytest.mark.parametrize(
    ("address", "is_one_host", "expected"),
    [
        ("127.0.0.1", True, LOOPBACK),
        ("127.0.0.1", False, LOOPBACK),  # asked for by number, as a cluster played on one machine does
        ("localhost", False, LOOPBACK),
        ("node1", True, LOOPBACK),
        ("node1", False, ANY),  # Ubuntu's /etc/hosts: the host's own name leads to itself alone
    ],
)
def test_listener_and_who_can_reach_it(
    address: str, is_one_host: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with listen(address, 0, is_one_host=is_one_host) as listener:
        assert listening_addresses()[listener.getsockname()[1]] == expected


def test_rendezvous_after_a_restart_by_torchrun_holds_nothing_of_the_last_start() -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # by torchrun, which lives on
    env = replace(rank_of_two(port=served.port), master_runs=True)

    def meet_as(rank: int) -> JobStore:
        return JobStore(rendezvous(replace(env, rank=rank), timeout_seconds=120), seconds=120)

    with ThreadPoolExecutor(2) as pool:
        first, restarted = (list(pool.map(meet_as, range(2))) for _ in range(2))
    first[0].set("key", "1")
    assert first[1].check(["key"])
    assert not any(store.check(["key"]) for store in restarted)
    restarted[0].add("here", 1)
    assert restarted[1].check(["here"])


def test_control_of_a_second_connection_shares_the_rendezvous_but_no_keys() -> None:
    first = half_a_job(rank_of_two(), 5.0)
    # the port would be in use, were it opened again
    second = JobControl(rank_of_two(), timeout_seconds=60)
    first.store.set("key", "1")
    assert not second.store.check(["key"])


def test_control_uses_the_store_of_a_default_process_group() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        env = ProcessEnv("none", 0, 2, 0, 2, "here", None)  # no master: nowhere else to meet
        met = JobControl(env, timeout_seconds=60)
        met.timeout_seconds = 0.2
        with pytest.raises(PeerLostError, match=naming("rank 0", "rank 1")):
            met.gather_text("x")
    finally:
        torch.distributed.destroy_process_group()


def test_rendezvous_at_a_port_in_use_names_it() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommError, match=naming("rank 0 on here", f"127.0.0.1:{port}", "in use", "MASTER_PORT")):
            rendezvous(rank_of_two(port=port), timeout_seconds=60)
        with pytest.raises(CommError, match=naming(f"127.0.0.1:{port}", "submit")):
            rendezvous(replace(rank_of_two(port=port), launcher="srun"), timeout_seconds=60)


def test_rendezvous_of_a_torchrun_that_has_ended_is_given_up_at_once() -> None:
    """It serves the rendezvous before it starts ranks; they must not wait for minutes after it was killed."""
    with listen("127.0.0.1", 0) as ended:
        port = ended.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(CommError, match=naming(f"127.0.0.1:{port}", "torchrun has ended", "MASTER_ADDR")) as caught:
        rendezvous(replace(rank_of_two(port=port), master_runs=True), timeout_seconds=60)
    assert "meeting_seconds" not in str(caught.value)
    assert time.monotonic() - started < 30


def test_rendezvous_whose_process_is_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system lets callers in for a process that is stopped, as it does for this socket."""
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.2)
    with listen("127.0.0.1", 0) as silent:
        port = silent.getsockname()[1]
        for env in (replace(rank_of_two(port=port), rank=1), replace(rank_of_two(port=port), master_runs=True)):
            with pytest.raises(CommError, match=naming(f"no rendezvous at 127.0.0.1:{port}", "check that rank 0 runs")):
                rendezvous(env, timeout_seconds=0.3)


def test_rendezvous_waits_for_rank_0s_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a pod is in Kubernetes' DNS some seconds after its start."""
    num_failures = 2

    def look_up(host: str, port: int | None, *_: object, **__: object) -> Any:
        nonlocal num_failures
        num_failures -= 1
        if num_failures >= 0:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    env = ProcessEnv("torchrun", 0, 2, 0, 2, "here", ("pod-0.job", 0), secret=b"s")
    assert rendezvous(env, timeout_seconds=120).port > 0
    num_failures = 1000
    with pytest.raises(CommError, match=naming("no rendezvous at pod-0.job", "not known", "MASTER_ADDR")):
        rendezvous(env, timeout_seconds=0.2)


def test_rendezvous_at_a_name_that_leads_back_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One /etc/hosts for all nodes, in which the first one's name is its own loopback address."""
    address = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: address)
    env = ProcessEnv("srun", 1, 2, 0, 1, "n1", ("n0", 1))
    with pytest.raises(CommError, match=naming("rank 1 on n1", "n0:1", "/etc/hosts", "MASTER_ADDR")):
        rendezvous(env, timeout_seconds=0.2)


def test_rendezvous_without_a_meeting_point_names_what_tells_one() -> None:
    env = ProcessEnv("torchrun", 1, 2, 1, 2, "here", None)  # a script set RANK, WORLD_SIZE and no address
    with pytest.raises(CommError, match=naming("rank 1 of 2", "set both MASTER_ADDR and MASTER_PORT", "free port")):
        rendezvous(env, timeout_seconds=60)


def test_meeting_names_the_ranks_that_are_late(capfd: pytest.CaptureFixture[str]) -> None:
    """The warning comes long before the limit: users do not watch a silent job for 15 minutes."""
    met = half_a_job(rank_of_two(), 60.0)
    met.meeting_seconds, met.warn_seconds = 0.5, 0.05
    assert isinstance(met.store, JobStore)
    met.store.delete_key("bigbatch/host/1")
    with pytest.raises(PeerLostError, match=r"rank 0: meeting of all ranks \(meeting_seconds=0\.5\) failed.*rank 1"):
        meet(rank_of_two(), met)
    assert capfd.readouterr().err.startswith("bigbatch: rank 0 on here waits for rank 1 to start")


def test_rank_that_finds_no_first_one_says_for_whom_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    late = replace(rank_of_two(port=port), rank=1)
    with pytest.raises(CommError, match=naming("rank 1", "check that rank 0 runs", "meeting_seconds=0.4")):
        JobControl(late, timeout_seconds=60, meeting_seconds=0.4, warn_seconds=0.05)
    said = f"bigbatch: rank 1 on here waits for rank 0, which has opened no rendezvous at 127.0.0.1:{port}\n"
    assert capfd.readouterr().err.startswith(said)


def test_meeting_point_that_no_name_service_knows_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def look_up(*_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    env = ProcessEnv("torchrun", 1, 2, 0, 1, "here", ("no-such-host", 1), secret=b"s")
    with pytest.raises(CommError):
        rendezvous(env, timeout_seconds=0.1)
    assert "cannot resolve MASTER_ADDR=no-such-host" in capfd.readouterr().err


@pytest.mark.parametrize("exchange", [lambda job: job.gather(1), lambda job: job.agree("the seed", "1")])
def test_exchange_with_a_rank_that_has_left_says_so(exchange: Callable[[JobControl], object]) -> None:
    def one(job: JobControl) -> str:
        if job.rank == 1:
            job.gather_text("", what="the last barrier")
            return ""
        with pytest.raises(CommError, match="rank 1 has closed its communicator") as caught:
            exchange(job)
        return str(caught.value)

    assert on_ranks(2, one)[1] == ""


def test_exchanges_over_torchs_store_leave_nothing() -> None:
    def one(job: JobControl) -> Any:
        for number in range(3):
            job.gather_text("ä" * WHOLE_BYTES * number)
            job.collect_text("ä" * WHOLE_BYTES * number, what="texts")
        return job.store.torch_store

    assert on_ranks(3, one)[0].num_keys() == 3, "the hosts"
