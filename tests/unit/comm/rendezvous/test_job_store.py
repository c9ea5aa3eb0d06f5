"""The job's store: what its process answers, which clients it accepts, and when it ends."""

import gc
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
from benchmark_process import fork_code
from forked_ranks import start_rank
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import PrefixStore, Store, TCPStore

from bigbatch.comm.rendezvous import job_store, limits, store_process
from bigbatch.comm.rendezvous.bounded_store import News, NoAnswerError
from bigbatch.comm.rendezvous.job_store import JobStore, StoreConnections, start_store
from bigbatch.comm.rendezvous.meeting import listen
from bigbatch.comm.rendezvous.secret import (
    HELLO_BYTES,
    NONCE_BYTES,
    AuthenticationError,
    ServerHandshake,
    authenticate,
    make_hello,
    receive_exactly,
)
from bigbatch.comm.rendezvous.store_process import DONE, LENGTH, KeyValueTable, StoreServer, pack, split

SECRET = b"of this job"


def held(secret: bytes = SECRET) -> StoreConnections:
    return start_store(listen("127.0.0.1", 0), secret, world_size=2, timeout_seconds=60)


def connect(port: int, *, secret: bytes = SECRET, rank: int = 1) -> StoreConnections:
    return StoreConnections("127.0.0.1", port, secret, rank=rank, timeout_seconds=60)


@pytest.fixture
def store() -> JobStore:
    return JobStore(held(), "job", seconds=60)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield the port of a server on a thread of this process."""
    is_over = Event()
    listener = listen("127.0.0.1", 0)
    with listener:
        where = listener.getsockname()[1]
        thread = Thread(target=StoreServer(listener, SECRET, world_size=2).serve, args=(is_over.is_set,))
        monkeypatch.setattr(limits, "STORE_LOOK_SECONDS", 0.05)
        thread.start()
        yield where
        is_over.set()
        thread.join(timeout=60)


# --- what it answers ---


def gone(store: JobStore) -> frozenset[int]:
    """The ranks whose processes have ended."""
    return store.tail("log", 0).gone


def test_job_store_tells_news_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was appended behind what a rank has read, or that a process has ended."""
    monkeypatch.setattr(limits, "GONE_SECONDS", 0.0)
    store, other = (JobStore(connect(port, rank=rank), seconds=60) for rank in (0, 1))
    assert store.tail("log", 0) == News(b"")
    other.append("log", "one\ntwo\n")
    assert store.tail("log", 4, seconds=60) == News(b"two\n")
    start = time.monotonic()
    assert store.tail("log", 8, seconds=0.2) == News(b"")
    assert 0.2 <= time.monotonic() - start < 30
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(each.tail, "log", 8, seconds=60) for each in (store, other)]
        assert not store.check(["other"])  # while others wait
        store.append("log", "three\n")
        assert [each.result() for each in waits] == [News(b"three\n")] * 2
        waiting = pool.submit(store.tail, "log", 14, seconds=60)
        while not waiting.done():  # it may not have asked yet
            store.append("log", "")  # ends it
        assert waiting.result() == News(b"")
        waiting = pool.submit(store.tail, "log", 14, seconds=60)
        other.connections.close()
        assert waiting.result() == News(b"", frozenset({1}), 1)
    assert store.tail("log", 14, num_gone=1, seconds=0.1) == News(b"", frozenset({1}), 1)


def use(store: Store) -> list[object]:
    """What ranks and torch ask of a store, and what was answered."""
    said: list[object] = [store.check(["a"])]
    store.set("a", "text")
    store.set("b", b"\0\xff")
    said += [store.get("a"), store.get("b"), store.check(["a", "b"]), store.check(["a", "c"])]
    said += [store.add("n", 2), store.add("n", -5), store.get("n")]
    store.append("list", "x ")  # type: ignore[attr-defined]
    store.append("list", "y ")  # type: ignore[attr-defined]
    said += [store.get("list"), store.multi_get(["a", "n"])]
    said += [store.compare_set("new", "", "1"), store.compare_set("new", "0", "2"), store.compare_set("new", "1", "3")]
    said += [store.compare_set("none", "expected", "desired"), store.check(["none"]), store.get("new")]
    said += [store.delete_key("a"), store.delete_key("a"), store.check(["a"])]
    store.wait(["b", "n"], timedelta(seconds=30))
    return said


def test_job_store_answers_as_torchs_own(store: JobStore) -> None:
    peer = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    expected = use(peer)
    assert use(store) == expected
    assert use(PrefixStore("from torch's C++", store)) == expected


def test_store_process_may_begin_late_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "_PROGRAM", f"import time; time.sleep(1); {job_store._PROGRAM}")
    connections = start_store(listen("127.0.0.1", 0), SECRET, world_size=2, timeout_seconds=0.1)
    assert not JobStore(connections, seconds=60).check(["key"])


def test_store_process_that_ends_at_once_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on memory or processes may end it."""
    monkeypatch.setattr(job_store, "_PROGRAM", "raise MemoryError")
    started = time.monotonic()
    with pytest.raises(OSError, match=r"refused|reset"):
        start_store(listen("127.0.0.1", 0), SECRET, world_size=2, timeout_seconds=60)
    assert time.monotonic() - started < 30


def test_job_store_lives_as_long_as_torch_asks_it(store: JobStore) -> None:
    by_torch = PrefixStore("group", store.torch_store)  # no other object holds it
    gc.collect()
    by_torch.set("key", "value")
    assert store.get("group/key") == b"value"


def test_job_store_waits_for_what_another_rank_writes(store: JobStore) -> None:
    other = JobStore(connect(store.connections.port), "job", seconds=60)
    with ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(store.get, "late"),
            pool.submit(other.multi_get, ["late", "count"]),
            pool.submit(other.wait, ["late"]),
        ]
        assert not other.check(["late"])  # while another thread waits
        other.add("count", 1)
        store.set("late", b"x" * 20_000_000)
        assert len(waits[0].result()) == 20_000_000
        assert waits[1].result()[1] == b"1"
        waits[2].result()


def test_job_store_tells_whether_a_key_came_in_time(port: int) -> None:
    store = JobStore(connect(port), seconds=60)
    start = time.monotonic()
    assert not store.wait_for("key", seconds=0.3)
    assert 0.3 <= time.monotonic() - start < 30
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(store.wait_for, key, seconds=60) for key in ("key", "other")]
        store.set("key", "value")
        assert waits[0].result()
        store.set("other", "value")
        assert waits[1].result()
    assert store.wait_for("key", seconds=0.0)
    assert JobStore(store.connections, seconds=1e9).check(["key"])  # more than poll() takes at once
    assert len(store.connections._idle) <= 3  # a wait that ended without the key costs no connection


def test_job_store_names_ranks_whose_every_connection_has_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GONE_SECONDS", 0.0)
    store, other = (JobStore(connect(port, rank=rank), seconds=60) for rank in (0, 3))
    with ThreadPoolExecutor(1) as pool:  # makes a second connection
        waiting = pool.submit(other.get, "late")
        assert not other.check(["late"])
        first = other.connections._idle.pop()
        first.close()
        assert not gone(store), "one is left"
        store.set("late", "")
        waiting.result()
    for stream in other.connections._idle:
        stream.close()
    time.sleep(0.1)
    assert not gone(store), "requests that were given up have ended theirs"
    other.connections._presence.close()
    assert ends(lambda: gone(store) == {3})
    monkeypatch.setattr(limits, "GONE_SECONDS", 60.0)
    assert not gone(store), "it may come back"
    monkeypatch.setattr(limits, "GONE_SECONDS", 0.0)
    other.connections._idle.clear()
    other.set("back", "")
    assert not gone(store)


FORKS = """
import multiprocessing, os, signal, time
from bigbatch.comm.rendezvous.job_store import JobStore, StoreConnections
connections = StoreConnections("127.0.0.1", {port}, {secret!r}, rank=3, timeout_seconds=60)
store = JobStore(connections, seconds=60)
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
worker.start()
store.set("worker", str(worker.pid))  # on the connection that the worker has inherited, too
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_job_store_counts_a_rank_as_gone_whose_workers_live_on(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children such as a loader's: forked after the rank has connected, and left running when it is killed."""
    monkeypatch.setattr(limits, "GONE_SECONDS", 0.0)
    store = JobStore(connect(port), seconds=60)
    code, output = fork_code(FORKS.format(port=port, secret=SECRET), cwd=tmp_path, timeout_seconds=200)
    assert code == -signal.SIGKILL, output
    worker = psutil.Process(int(store.get("worker")))
    try:
        assert ends(lambda: gone(store) == {3})
        assert worker.is_running()
    finally:
        worker.kill()


def test_job_store_gives_up_a_holder_that_is_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, stopped.getsockname()[1])
        streams = []
        for _ in range(2):  # one of them shows that it is there
            stream, _ = stopped.accept()
            handshake = ServerHandshake(SECRET, "store")
            stream.sendall(handshake.nonce)
            stream.sendall(handshake.verify(receive_exactly(stream, HELLO_BYTES))[1])
            streams.append(stream)
        store = JobStore(calling.result(), seconds=0.1)
        with pytest.raises(NoAnswerError, match=r"not answered within 0\.1 s"):
            store.check(["key"])
        view = JobStore(store.connections, seconds=60).within(60).within(0.2)
        start = time.monotonic()
        for _ in range(20):  # one limit for all that it asks
            with pytest.raises(NoAnswerError):
                view.check(["key"])
        assert 0.1 < time.monotonic() - start < 30
        stream.close()


def test_job_store_says_that_a_wait_timed_out(store: JobStore) -> None:
    with pytest.raises(RuntimeError, match=r"wait for key timed out after 0\.1 s"):
        store.wait(["key"], timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="timed out"):
        JobStore(store.connections, "job", seconds=0.1).torch_store.get("key")
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_job_store_whose_holder_has_ended_says_so(port: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", lambda where, timeout: socket.socketpair()[0])
        with pytest.raises(OSError, match=r"."):
            StoreConnections("127.0.0.1", port, SECRET, rank=1, timeout_seconds=0.2)
    store = JobStore(connect(port), "job", seconds=60)
    store.connections._idle[0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(RuntimeError, match=rf"the store at 127\.0\.0\.1:{port} has ended"):
        store.check(["key"])


@pytest.mark.skipif(not Path("/proc/net/if_inet6").read_text(), reason="this machine has no IPv6")
def test_job_store_is_reached_by_ipv6() -> None:
    connections = start_store(listen("::1", 0), SECRET, world_size=2, timeout_seconds=60)
    store = JobStore(StoreConnections("::1", connections.port, SECRET, rank=1, timeout_seconds=60), seconds=60)
    assert store.add("count", 1) == 1


# --- which clients it accepts ---


def is_closed(stream: socket.socket) -> bool:
    stream.settimeout(60)
    with suppress(ConnectionError):
        while more := stream.recv(4096):
            assert len(more) <= NONCE_BYTES  # no stranger is told anything else
    return True


def test_store_lets_nobody_in_who_does_not_know_the_secret(port: int) -> None:
    for secret in (b"", b"another", SECRET + b"\n"):
        with pytest.raises(AuthenticationError, match="different secrets"):
            connect(port, secret=secret)
    hello, _ = make_hello(SECRET, "store", bytes(NONCE_BYTES), rank=1)  # for what another handshake drew
    assert SECRET not in hello
    for words in (hello, b"GET / HTTP/1.1\r\n\r\n".ljust(200), bytes(56), os.urandom(1000)):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            assert is_closed(stranger)
    assert not JobStore(connect(port), seconds=60).check(["key"])


def test_rank_turns_away_from_a_store_that_does_not_know_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, impostor.getsockname()[1])
        stream, _ = impostor.accept()
        with stream:
            stream.sendall(bytes(NONCE_BYTES))
            stream.recv(1000)
            stream.sendall(bytes(32))
            with pytest.raises(AuthenticationError, match="does not know the job's secret"):
                calling.result()


def test_store_expires_callers_who_say_nothing(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_process, "HELLO_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        assert is_closed(silent)


@pytest.fixture
def few_strangers(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the server's limit of unauthenticated connections."""
    monkeypatch.setattr(store_process, "MAX_UNAUTHENTICATED", 8)
    return 8 + 2


def test_store_is_not_kept_from_its_ranks_by_idle_callers(
    few_strangers: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_process, "HELLO_SECONDS", 3600.0)  # closed for no other reason
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(30 + few_strangers)]
    store = JobStore(connect(port), seconds=60)
    store.set("key", "value")
    assert store.get("key") == b"value"
    for stream in idle[:30]:  # the first to come, the first to go
        assert is_closed(stream)
    for stream in idle:
        stream.close()


@pytest.mark.parametrize(
    "request_",
    [
        pack(b"no such thing"),
        pack(b"add", b"key"),
        pack(b"add", b"key", b"many"),
        pack(b"set", b"key"),
        pack(b"tail", b"1", b"key"),
        pack(b"tail", b"1", b"key", b"begin", b"0"),
        pack(),
        b"\0\0\0\x09cut off",
    ],
)
def test_store_ends_the_connection_of_a_request_that_makes_no_sense(request_: bytes, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as stream:
        authenticate(stream, SECRET, "store", rank=3)
        stream.sendall(LENGTH.pack(len(request_)) + request_)
        assert is_closed(stream)
    with socket.create_connection(("127.0.0.1", port)) as stream:
        authenticate(stream, SECRET, "store", rank=3)
        stream.sendall(LENGTH.pack(store_process.MAX_REQUEST_BYTES + 1))
        assert is_closed(stream)
    assert not JobStore(connect(port), seconds=60).check(["key"])


@pytest.mark.parametrize("first", [pack(b"wait", b"60", b"early"), pack(b"tail", b"60", b"early", b"0", b"0")])
def test_store_forgets_a_wait_that_its_client_has_replaced(first: bytes, port: int) -> None:
    """The key of the first one is set by another rank, which must not lose its connection by it."""
    store = JobStore(connect(port), seconds=60)
    with socket.create_connection(("127.0.0.1", port)) as stream:
        authenticate(stream, SECRET, "store", rank=3)
        for request_ in (first, pack(b"wait", b"60", b"late")):
            stream.sendall(LENGTH.pack(len(request_)) + request_)
        stream.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stream.recv(1)
        store.set("early", b"1")
        with pytest.raises(TimeoutError):
            stream.recv(1)
        store.set("late", b"1")
        stream.settimeout(60)
        assert stream.recv(99) == LENGTH.pack(len(DONE)) + DONE


def test_store_without_descriptors_serves_those_it_knows(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(connect(port), seconds=60)
    refused = Event()

    def refuse(self: socket.socket) -> None:
        refused.set()
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", refuse)
        with socket.create_connection(("127.0.0.1", port)):
            assert refused.wait(timeout=60)
            store.set("key", "value")
    assert JobStore(connect(port), seconds=60).get("key") == b"value"


@given(st.binary(max_size=200))
def test_requests_of_any_bytes_are_carried_out_or_refused(data: bytes) -> None:
    with suppress(ValueError, LookupError, TypeError):
        parts = split(data)
        assert split(pack(*parts)) == parts
        KeyValueTable().answer(parts)


# --- when it ends ---

HOLDER = """\
import os, sys, time
from bigbatch.comm.rendezvous.job_store import start_store
from bigbatch.comm.rendezvous.meeting import listen
connections = start_store(listen("127.0.0.1", 0), b"of this job", world_size=2, timeout_seconds=60)
child = os.fork()  # as workers that read images, which inherit all that is open
if child == 0:
    time.sleep(600)
print(connections.port, child, flush=True)
time.sleep(600)
"""


def ends(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def is_refused(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_store_process_ends_with_a_rank_that_is_killed_though_it_is_stopped(tmp_path: Path) -> None:
    log, arguments = tmp_path / "output.txt", (str(tmp_path), HOLDER)
    rank = start_rank(
        "benchmark_process:live_as_code", arguments, environ={}, stdout=log, stderr=log, has_children=True
    )
    try:
        assert ends(lambda: log.exists() and log.read_text().endswith("\n")), "its port and its child are told"
        port, child = map(int, log.read_text().split())
        assert not is_refused(port)
        (store,) = (each for each in psutil.Process(rank.pid).children() if each.pid != child)
        store.suspend()
        assert ends(lambda: store.status() == psutil.STATUS_STOPPED)  # a signal takes its time to arrive
        rank.kill()
        assert ends(lambda: is_refused(port))  # though a child of it lives on
        os.kill(child, signal.SIGKILL)
    finally:
        rank.kill()
        rank.join()


def test_store_process_ends_once_its_last_owner_has_ended() -> None:
    connections = held()
    port = connections.port
    del connections
    assert is_refused(port)


def test_store_process_leaves_signals_to_the_rank(store: JobStore) -> None:
    listing = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "store_process"], capture_output=True, text=True)
    for process in map(int, listing.stdout.split()):
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(process, each)
    store.set("key", "value")
    assert store.get("key") == b"value"
