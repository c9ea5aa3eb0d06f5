"""Byte streams over TCP: ranks are threads here, in one process."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
from error_texts import naming
from torch.distributed import HashStore

from bigbatch.comm.backends import links
from bigbatch.comm.backends.links import HEADER, Links, avoid_bbr
from bigbatch.comm.backends.tcp import as_bytes
from bigbatch.comm.rendezvous import secret as proofs
from bigbatch.comm.rendezvous.control import Pending
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import CommError

SECRET = b"of this job"
CRITICS = (1, "second"), (0, "first")


@pytest.fixture
def store() -> HashStore:
    shared = HashStore()
    shared.set_timeout(timedelta(seconds=60))
    return shared


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "POLL_SECONDS", 0.1)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def give_up(seconds: float) -> None:
    raise TimeoutError("a rank timed out")


def join(
    store: HashStore,
    rank: int,
    *,
    world_size: int = 2,
    while_waiting: Callable[[float], None] = lambda seconds: None,
    interface: str | None = None,
    secret: bytes = SECRET,
) -> Links:
    here = ("here", ("127.0.0.1", 1))
    env = ProcessEnv("torchrun", rank, world_size, rank, world_size, *here, interface=interface)
    control = SimpleNamespace(
        read=lambda key, what: store.get(key).decode(),
        detector=SimpleNamespace(explained=lambda what: nullcontext()),
        master=env.master,
        secret=secret,
        store=store,
        timeout_seconds=5.0,
        host="here",
        host_of=lambda peer: f"node{peer}",
    )
    return Links(env, control, while_waiting=while_waiting)  # type: ignore[arg-type]


def address_of(store: HashStore, rank: int) -> tuple[str, int]:
    address, port, _ = store.get(f"bigbatch/tcp/{rank}").decode().split()
    return address, int(port)


def say(job: Links, message: bytes, *, to: int) -> None:
    job.send(memoryview(message), to=to).wait()


def hear(job: Links, num_bytes: int, *, source: int) -> bytes:
    data = bytearray(num_bytes)
    job.receive(memoryview(data), source=source).wait()
    return bytes(data)


def deliver(threads: ThreadPoolExecutor, first: Links, second: Links) -> None:
    """Rank 1 sends to rank 0, from another thread."""
    there = threads.submit(say, second, b"there", to=0)
    assert hear(first, 5, source=1) == b"there"
    there.result()


def introduce(store: HashStore, rank: int, *, secret: bytes = SECRET) -> socket.socket:
    stream = socket.create_connection(address_of(store, 0), timeout=200)
    nonce = bytes.fromhex(store.get("bigbatch/tcp/0").decode().split()[2])
    stream.sendall(proofs.make_hello(secret, "links of rank 0", nonce, rank=rank)[0])
    return stream


def test_links_turn_a_stranger_away_and_the_job_goes_on(store: HashStore, threads: ThreadPoolExecutor) -> None:
    first, second = join(store, 0), join(store, 1)
    strangers = [introduce(store, 1, secret=b"another"), socket.create_connection(address_of(store, 0), timeout=200)]
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].shutdown(socket.SHUT_WR)
    silent = socket.create_connection(address_of(store, 0), timeout=200)
    deliver(threads, first, second)
    for stranger in strangers:
        assert stranger.recv(1) == b""  # closed
    assert list(first._links) == [1]
    silent.close()


def test_links_turn_a_second_caller_under_one_rank_away(store: HashStore, threads: ThreadPoolExecutor) -> None:
    jobs = [join(store, rank, world_size=3) for rank in range(3)]
    deliver(threads, *jobs[:2])
    with introduce(store, 1) as twin:
        late = threads.submit(say, jobs[2], b"late", to=0)
        assert hear(jobs[0], 4, source=2) == b"late"  # had to accept, and met the twin first
        late.result()
        assert twin.recv(1) == b""


def test_links_refuse_a_peer_that_cannot_prove_itself(store: HashStore, threads: ThreadPoolExecutor) -> None:
    """A process that listens at the port of a rank that has ended."""
    first, second = join(store, 0), join(store, 1)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        nonce = store.get("bigbatch/tcp/0").decode().split()[2]
        store.set("bigbatch/tcp/0", f"127.0.0.1 {impostor.getsockname()[1]} {nonce}")
        heard = threads.submit(hear, second, 5, source=0)
        stream, _ = impostor.accept()
        with stream:
            assert len(stream.recv(1000)) == proofs.HELLO_BYTES
            stream.sendall(bytes(proofs.PROOF_BYTES) + HEADER.pack(5, 0, 0, 0, 0) + b"wrong")
            with pytest.raises(CommError, match=naming("rank 0", "does not know this job's secret")):
                heard.result()
    first.close()


def test_links_take_no_introduction_twice(store: HashStore) -> None:
    """An overheard introduction is not proof to another rank, nor for another rank."""
    job, other = join(store, 0, world_size=3), join(store, 1, world_size=3)
    nonces = [bytes.fromhex(store.get(f"bigbatch/tcp/{rank}").decode().split()[2]) for rank in range(2)]
    assert nonces[0] != nonces[1]
    overheard, _ = proofs.make_hello(SECRET, "links of rank 0", nonces[0], rank=2)
    with pytest.raises(proofs.AuthenticationError):
        other._handshake.verify(overheard)
    as_another = overheard[:4] + (1).to_bytes(4, "big") + overheard[8:]
    with pytest.raises(proofs.AuthenticationError):
        job._handshake.verify(as_another)
    assert job._handshake.verify(overheard)[0] == 2


def test_links_send_off_who_says_nothing_and_keep_their_number_small(
    store: HashStore, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_UNAUTHENTICATED", 3)
    monkeypatch.setattr(links, "HELLO_SECONDS", 0.2)
    first, second = join(store, 0), join(store, 1)
    idle = [socket.create_connection(address_of(store, 0), timeout=30) for _ in range(20)]
    heard = threads.submit(hear, first, 5, source=1)
    for stream in idle:
        assert stream.recv(1) == b""  # also the last five, after their time
    say(second, b"there", to=0)
    assert heard.result() == b"there"
    assert not first._unauthenticated


def test_links_without_descriptors_go_on(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    job = join(store, 0)
    peer = introduce(store, 1)
    refusals, accept = iter(range(5)), socket.socket.accept

    def run_short(listener: socket.socket) -> tuple[socket.socket, object]:
        if next(refusals, None) is not None:
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", run_short)
    peer.sendall(HEADER.pack(3, 0, 0, 0, 0) + b"abc")
    assert hear(job, 3, source=1) == b"abc"
    assert next(refusals, None) is None


@pytest.mark.parametrize("length", [0, 3, 8])
def test_message_of_another_length_is_refused(length: int, store: HashStore) -> None:
    job = join(store, 0)
    with introduce(store, 1) as peer:
        peer.sendall(HEADER.pack(length, 0, 0, 0, 0) + bytes(length))
        with pytest.raises(CommError, match=rf"rank 1 .*\b{length} bytes .*\b5 "):
            hear(job, 5, source=1)


def test_message_of_another_operation_is_refused_by_number_and_name(store: HashStore) -> None:
    """Also of equal size: two sums of two reducers, in another order, would be added to each other."""
    job = join(store, 0)
    for number, label in ((6, "second critic"), (7, "first critic")):
        job.tags.begin(Pending(number, label, 0.0, size=(9, torch.float64)))
    with introduce(store, 1) as peer:
        peer.sendall(HEADER.pack(5, 7, crc32(b"second critic"), 9, 1) + bytes(5))
        theirs, ours = (f"rank {rank} runs operation 7 ({name} critic, 9 of float64)" for rank, name in CRITICS)
        said = naming(theirs, ours, "wait()")
        with pytest.raises(CommError, match=said):
            hear(job, 5, source=1)


def test_length_that_comes_in_pieces_is_read(store: HashStore, threads: ThreadPoolExecutor) -> None:
    job = join(store, 0)
    with introduce(store, 1) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        message = HEADER.pack(3, 0, 0, 0, 0) + b"abc"

        def dribble() -> None:
            for byte in message:
                peer.sendall(bytes([byte]))
                time.sleep(0.01)

        slowly = threads.submit(dribble)
        assert hear(job, 3, source=1) == b"abc"
        slowly.result()


@pytest.mark.parametrize("last_words", [b"", b"\0\0", HEADER.pack(5, 0, 0, 0, 0), HEADER.pack(5, 0, 0, 0, 0) + b"th"])
def test_peer_that_leaves_is_noticed_at_once(last_words: bytes, store: HashStore) -> None:
    job = join(store, 0)
    peer = introduce(store, 1)
    peer.sendall(last_words)
    peer.close()
    with pytest.raises(ConnectionResetError, match=naming("rank 1", "closed")):
        hear(job, 5, source=1)


def test_peer_that_leaves_while_it_is_sent_to_is_noticed(store: HashStore) -> None:
    job = join(store, 0)
    introduce(store, 1).close()
    with pytest.raises(ConnectionError):
        say(job, bytes(100_000_000), to=1)  # more than the kernel takes before it knows


@pytest.mark.parametrize("is_connected", [False, True])
def test_wait_ends_at_once_where_the_links_are_shut_down(
    is_connected: bool, store: HashStore, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread of a rank that has noticed a loss shuts them down; that is how its peers notice."""
    monkeypatch.setattr(links, "POLL_SECONDS", 0.01)
    first, second = join(store, 0), join(store, 1)
    if is_connected:
        deliver(threads, first, second)
    waits = threads.submit(hear, first, 5, source=1)
    first.shut_down()
    with pytest.raises(ConnectionError):
        waits.result(timeout=200)
    if is_connected:
        with pytest.raises(ConnectionResetError):
            hear(second, 5, source=0)


@pytest.mark.parametrize("connects", [False, True])
def test_peer_that_never_connects_or_sends_nothing_is_given_up(connects: bool, store: HashStore) -> None:
    job = join(store, 0, while_waiting=give_up)
    with introduce(store, 1) if connects else nullcontext(), pytest.raises(TimeoutError, match=naming("rank")):
        hear(job, 5, source=1)


def test_peer_out_of_reach_is_named_with_its_address(store: HashStore) -> None:
    join(store, 0).close()  # listens no more
    where = ":".join(map(str, address_of(store, 0)))
    with pytest.raises(
        CommError, match=naming("rank 1 on here", "rank 0 on node0", where, "refused", "comm.interface")
    ):
        say(join(store, 1), b"x", to=0)


def test_links_lead_to_no_rank_itself(store: HashStore) -> None:
    with pytest.raises(ValueError, match=naming("rank 0", "itself")):
        say(join(store, 0), b"x", to=0)


def test_links_listen_on_the_named_interface_alone(store: HashStore) -> None:
    assert join(store, 0, interface="lo")._listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(CommError, match=naming("'ib7'", "lo", "comm.interface")):
        join(store, 0, interface="ib7")


@pytest.mark.skipif(not Path("/proc/net/if_inet6").read_text(), reason="this machine has no IPv6")
def test_links_go_by_ipv6(store: HashStore, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "own_address", lambda **_: "::1")
    first, second = join(store, 0), join(store, 1)
    assert first._listener.getsockname()[0] == "::1"
    deliver(threads, first, second)


def test_links_move_all_transfers_while_anyone_waits(store: HashStore, threads: ThreadPoolExecutor) -> None:
    """Two ranks that both send 8 MB before they receive: neither can finish unless waiting to send also receives."""
    jobs = [join(store, rank) for rank in range(2)]
    sent = [bytes([rank + 1]) * 8_000_000 for rank in range(2)]
    together = threading.Barrier(2)

    def swap(rank: int) -> bytes:
        data = bytearray(len(sent[rank]))
        together.wait(timeout=200)
        receiving = jobs[rank].receive(memoryview(data), source=1 - rank)
        say(jobs[rank], sent[rank], to=1 - rank)
        receiving.wait()
        return bytes(data)

    assert list(threads.map(swap, range(2))) == [sent[1], sent[0]]


def test_as_bytes_takes_only_contiguous_tensors() -> None:
    assert bytes(as_bytes(torch.tensor([1, 2], dtype=torch.int16))) == b"\1\0\2\0"
    with pytest.raises(ValueError, match=naming("contiguous")):
        as_bytes(torch.zeros(4)[::2])


def test_links_go_on_sending_while_their_rank_waits_for_a_caller(store: HashStore, threads: ThreadPoolExecutor) -> None:
    """Rank 0 owes rank 1 most of 16 MB while it waits for rank 2, which comes only when rank 1 has all of it."""
    jobs = [join(store, rank, world_size=3) for rank in range(3)]
    data = bytes(16_000_000)
    deliver(threads, *jobs[:2])

    def pass_on() -> None:
        hear(jobs[1], len(data), source=0)
        say(jobs[1], b"now", to=2)

    def come_late() -> None:
        hear(jobs[2], 3, source=1)
        say(jobs[2], b"here", to=0)

    others = [threads.submit(pass_on), threads.submit(come_late)]
    jobs[0].send(memoryview(data), to=1)
    assert hear(jobs[0], 4, source=2) == b"here"
    for other in others:
        other.result()


# --- congestion control ---


class KnownStream:
    """A socket with a congestion control, and those that its kernel would allow."""

    def __init__(self, control: str, allowed: tuple[str, ...]) -> None:
        self.control, self.allowed = control, allowed

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self.control.encode().ljust(size, b"\0")

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        if value.decode() not in self.allowed:
            raise FileNotFoundError(2, "No such file or directory")
        self.control = value.decode()


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system has no choice of congestion control")
@pytest.mark.parametrize(
    ("default", "allowed", "taken"),
    [
        ("bbr", ("cubic", "reno"), "cubic"),
        ("bbr", (), "bbr"),
        ("bbr2", ("reno",), "reno"),
        ("dctcp", ("cubic", "reno"), "dctcp"),
    ],
)
def test_bbr_alone_is_left(default: str, allowed: tuple[str, ...], taken: str) -> None:
    stream = KnownStream(default, allowed)
    avoid_bbr(stream)  # type: ignore[arg-type]
    assert stream.control == taken
