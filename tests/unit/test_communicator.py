"""One process: choosing device and backend, the single backend, the queue, and errors that need no peer."""

import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bigbatch.comm.algorithms import ALGORITHMS, make_allreduce
from bigbatch.comm.algorithms.ring import ring_allreduce_
from bigbatch.comm.backends import in_flight, mpi, torch_distributed
from bigbatch.comm.backends.base import CommError, PeerLostError
from bigbatch.comm.backends.in_flight import StreamQueue, ThreadQueue
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend, _rendezvous, first_line, listen
from bigbatch.comm.communicator import choose_device, connect, first_difference
from bigbatch.comm.environ import ProcessEnv
from bigbatch.comm.topology import make_topology

ALONE = ProcessEnv("none", 0, 1, 0, 1, "here", None)
SECONDS = timedelta(seconds=5)


def rank_of_two(*, launcher: str = "torchrun", port: int = 0, address: str = "127.0.0.1") -> ProcessEnv:
    """Rank 0 of two on one host."""
    return ProcessEnv(launcher, 0, 2, 0, 2, "here", (address, port))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_elements", [0, 1, 3, 1000])
def test_the_sum_over_one_rank_is_exact(algorithm: str, dtype: torch.dtype, num_elements: int) -> None:
    alone = connect(algorithm=algorithm, env=ALONE, device=torch.device("cpu"))
    values_N = torch.randn(num_elements, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor_N = values_N.clone()
    assert alone.sum_(tensor_N, label="test") is tensor_N
    assert torch.equal(tensor_N, values_N)


def test_a_world_of_one() -> None:
    alone = connect(env=ALONE, device=torch.device("cpu"))
    assert (alone.rank, alone.world_size, alone.device) == (0, 1, torch.device("cpu"))
    assert str(alone) == "1 ranks in 1 node groups, started by none; backend single, all-reduce native"
    alone.agree("anything", "text")
    alone.close()


def test_the_single_backends_transfers_are_copies() -> None:
    backend = SingleBackend()
    group = backend.new_group([[0]])
    source_N, target_N = torch.arange(3.0), torch.zeros(3)
    backend.all_gather(target_N, source_N, group)
    assert torch.equal(target_N, source_N)
    backend.reduce_scatter(target_N, 2 * source_N, group)
    assert torch.equal(target_N, 2 * source_N)
    backend.exchange(send=source_N, to=0, receive=target_N, source=0)
    assert torch.equal(target_N, source_N)
    for operation in (backend.all_reduce_, backend.reduce_, backend.broadcast_):
        operation(target_N, group)
        assert torch.equal(target_N, source_N)
    assert backend.all_gather_text("x") == ["x"]


def test_closing_a_world_of_one_under_mpirun_starts_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # not installed
    connect(env=ProcessEnv("openmpi", 0, 1, 0, 1, "here", None), device=torch.device("cpu")).close()


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="backend 'nvlink' is unknown; choose one of auto, nccl, gloo, mpi"):
        connect(backend="nvlink", env=ALONE)
    with pytest.raises(ValueError, match="algorithm 'tree' is unknown; choose one of native, ring"):
        connect(algorithm="tree", env=ALONE, device=torch.device("cpu"))


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("gloo", "cuda:0"), ("mpi", "cuda:0")])
def test_a_backend_for_other_devices_is_refused(backend: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"backend '{backend}' does not sum tensors on {device}: nccl is for GPUs"):
        connect(backend=backend, env=ALONE, device=torch.device(device))


def test_a_second_connection_beside_the_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(CommError, match="connected already: use the communicator that it has, or close it first"):
        connect(backend="gloo", env=rank_of_two(), device=torch.device("cpu"))


def test_sharded_is_refused_on_uneven_nodes() -> None:
    topology = make_topology(["a", "a", "b"], rank=0)
    with pytest.raises(ValueError, match="node groups of 2, 1 ranks have no equal columns; use algorithm 'hier"):
        make_allreduce("sharded", backend=SingleBackend(), topology=topology)


@pytest.mark.parametrize("tensor", [torch.zeros(2, 2), torch.zeros(4)[::2]])
def test_a_ring_wants_a_flat_buffer(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a ring needs a flat, contiguous buffer"):
        ring_allreduce_(tensor, SingleBackend(), (0,))


def test_choice_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(ALONE) == torch.device("cpu")
    with pytest.raises(CommError, match="1 ranks on here but 0 GPUs: start one rank per GPU"):
        choose_device(ALONE, backend="nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    third = ProcessEnv("openmpi", 6, 8, 2, 4, "here", None)
    assert choose_device(third) == torch.device("cuda", 2)
    assert chosen == [torch.device("cuda", 2)]
    assert choose_device(third, backend="gloo") == choose_device(third, backend="mpi") == torch.device("cpu")
    with pytest.raises(CommError, match="8 ranks on here but 4 GPUs"):
        choose_device(ProcessEnv("openmpi", 6, 8, 6, 8, "here", None))


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ("a: 1\n  b: 2", "a: 1\n  b: 3", "'b: 2' against 'b: 3'"),
        ("a\nb", "a", "one is longer"),
        ("a\nb\nc", "x\nb\ny", "'a' against 'x'"),
    ],
)
def test_texts_are_compared_by_line(ours: str, theirs: str, difference: str) -> None:
    assert first_difference(ours, theirs) == difference


# --- the rendezvous ---


def listening_addresses() -> dict[int, str]:
    """Port -> address in hexadecimal of all IPv4 sockets of this machine that listen."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(port, 16): ip for ip, port in (line[1].split(":") for line in lines if line[3] == "0A")}


needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc/net/tcp")
LOOPBACK, ANY = "0100007F", "00000000"


@needs_proc
def test_the_rendezvous_of_one_host_listens_on_loopback_alone() -> None:
    store = _rendezvous(rank_of_two(), SECONDS)
    assert listening_addresses()[store.port] == LOOPBACK


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
def test_who_can_reach_the_listener(
    address: str, is_one_host: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with listen(address, 0, is_one_host=is_one_host) as listener:
        assert listening_addresses()[listener.getsockname()[1]] == expected


def test_ranks_that_torchrun_restarted_read_nothing_of_the_last_attempt() -> None:
    served = _rendezvous(rank_of_two(), SECONDS)  # by torchrun, which lives on
    env = replace(rank_of_two(port=served.port), master_runs=True)
    first, restarted = (_rendezvous(replace(env, attempt=attempt), SECONDS) for attempt in (0, 1))
    first.set("bigbatch/failed", "1")
    assert first.check(["bigbatch/failed"])
    assert not restarted.check(["bigbatch/failed"])


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommError, match=f"rank 0 on here: no rendezvous at 127.0.0.1:{port}: .*in use; check"):
            _rendezvous(rank_of_two(port=port), SECONDS)


def test_no_meeting_point_is_named() -> None:
    env = ProcessEnv("openmpi", 0, 2, 0, 2, "here", None)
    with pytest.raises(CommError, match=r"openmpi tells ranks no meeting point: install mpi4py .*set MASTER_ADDR"):
        _rendezvous(env, SECONDS)


def test_ranks_that_do_not_come_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(CommError, match=r"rank 0 on here: gloo could not connect 2 ranks: .*GLOO_SOCKET_IFNAME"):
        connect(backend="gloo", env=rank_of_two(), timeout_seconds=1)


def half_a_job(seconds: float) -> TorchDistributedBackend:
    """Rank 0 of a job of two that had met; rank 1 is silent from now on."""
    backend = object.__new__(TorchDistributedBackend)
    backend.name, backend.rank, backend.world_size = "gloo", 0, 2
    backend._store = _rendezvous(rank_of_two(), timedelta(seconds=seconds))
    backend._store.set("bigbatch/host/1", "node1")
    backend._store_holder, backend._texts = "rank 0", 0
    return backend


def test_a_rank_that_misses_a_comparison_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_distributed, "ROLL_CALL_SECONDS", 0.2)
    monkeypatch.setattr(torch_distributed, "LINGER_SECONDS", 0.0)
    expected = (
        r"rank 0: comparison of a text over all ranks failed after 0\.\d s; no answer from rank 1 on node1 \(gloo:"
    )
    with pytest.raises(PeerLostError, match=expected):
        half_a_job(0.3).all_gather_text("seed: 1")


def test_a_last_barrier_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("connection closed")

    monkeypatch.setattr(torch_distributed, "ROLL_CALL_SECONDS", 0.2)
    monkeypatch.setattr(torch_distributed, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(torch.distributed, "barrier", fail)
    backend = half_a_job(5)
    backend._queue = ThreadQueue(explain, while_waiting=be_patient)
    with pytest.raises(PeerLostError, match=r"rank 0: the last barrier failed .* no answer from rank 1 on node1"):
        backend.close()


def test_another_ranks_failure_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_distributed, "ROLL_CALL_SECONDS", 2.0)
    monkeypatch.setattr(torch_distributed, "LINGER_SECONDS", 0.0)
    backend = half_a_job(5)
    backend._heed_others("buffer 0", 1.0)  # nothing was reported: go on
    backend._store.set("bigbatch/alive/1", "1")
    backend._store.set("bigbatch/failed", "1")
    with pytest.raises(
        PeerLostError, match=r"buffer 0 failed after 1\.0 s; all ranks still answer .*another rank reports"
    ):
        backend._heed_others("buffer 0", 1.0)


def test_errors_are_cut_to_their_first_line() -> None:
    gloo = "[../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:4321\nat x"
    assert first_line(RuntimeError(gloo)) == "Connection closed by peer [127.0.0.1]:4321"
    assert first_line(RuntimeError("[rank 1] lost")) == "[rank 1] lost"
    assert first_line(KeyError()) == "KeyError"


# --- MPI without MPI ---


def test_mpi_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CommError, match=r"needs mpi4py and an MPI library: pip install 'bigbatch\[mpi\]'"):
        mpi.import_mpi()


@pytest.mark.parametrize("failure", [ImportError, RuntimeError])
def test_mpi4py_without_a_library_names_the_extra(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass\n")
    (package / "MPI.py").write_text(f"raise {failure.__name__}('cannot load MPI library\\nlong story')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(CommError, match=r"finds no MPI library \(cannot load MPI library\): pip install"):
        mpi.import_mpi()
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def fake_mpi(monkeypatch: pytest.MonkeyPatch, *, rank: int, size: int) -> None:
    """An MPI world in which a broadcast gives rank 0's answer."""
    world = SimpleNamespace(rank=rank, size=size, bcast=lambda answer, root: answer)
    monkeypatch.setattr(mpi, "import_mpi", lambda: SimpleNamespace(COMM_WORLD=world))


def test_an_mpi_library_that_sees_another_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, rank=0, size=1)
    with pytest.raises(CommError, match="torchrun started rank 0 of 2, but MPI sees rank 0 of 1: start the job with"):
        connect(backend="mpi", env=rank_of_two())


def test_the_meeting_point_of_one_host_is_a_free_port_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, rank=0, size=2)
    address, port = mpi.meet_by_mpi(ProcessEnv("openmpi", 0, 2, 0, 2, "here", None))
    with listen(address, port):
        assert address == "127.0.0.1"


@pytest.mark.parametrize(
    ("resolves_to", "message"),
    [("127.0.1.1", "resolves to 127.0.1.1, which other nodes cannot reach"), (None, "does not resolve")],
)
def test_a_host_name_that_leads_nowhere_is_named(
    resolves_to: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(_: str) -> str:
        if resolves_to is None:
            raise socket.gaierror("Name or service not known")
        return resolves_to

    fake_mpi(monkeypatch, rank=0, size=2)
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    with pytest.raises(CommError, match=f"{message}.*: mend /etc/hosts, or set MASTER_ADDR and MASTER_PORT"):
        mpi.meet_by_mpi(ProcessEnv("openmpi", 0, 2, 0, 1, "here", None))


# --- operations in flight ---


def explain(label: str, seconds: float, error: Exception) -> PeerLostError:
    """As a backend would, without a roll call."""
    return PeerLostError(f"{label}: {error}")


def be_patient(label: str, seconds: float) -> None:
    """Wait as long as it takes."""


def assert_true(value: bool) -> None:
    """An assertion as an operation."""
    assert value


def test_a_queue_runs_in_order_beside_its_caller() -> None:
    queue = ThreadQueue(explain, while_waiting=be_patient)
    gate, done = threading.Event(), list[int]()
    queue.submit(lambda: assert_true(gate.wait(timeout=10)), label="first")
    works = [queue.submit(partial(done.append, i), label="later") for i in range(5)]
    assert done == []
    gate.set()
    works[-1].wait()
    assert done == [0, 1, 2, 3, 4]
    queue.close()
    with pytest.raises(CommError, match="buffer 0 comes too late: the communicator is closed"):
        queue.submit(lambda: None, label="buffer 0")


def test_after_a_failure_nothing_more_is_tried() -> None:
    queue = ThreadQueue(explain, while_waiting=be_patient)
    done: list[str] = []

    def fail() -> None:
        raise OSError("connection closed")

    works = [queue.submit(fail, label="buffer 0"), queue.submit(lambda: done.append("ran"), label="buffer 1")]
    for work in works:
        with pytest.raises(PeerLostError, match="buffer 0: connection closed"):
            work.wait()
    assert done == []
    queue.close()


def test_a_wait_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "POLL_SECONDS", 0.01)
    gate = threading.Event()

    def give_up(label: str, seconds: float) -> None:
        if seconds > 0.05:
            raise PeerLostError(f"{label} given up")

    queue = ThreadQueue(explain, while_waiting=give_up)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="buffer 0 given up"):
        queue.submit(lambda: assert_true(gate.wait(timeout=10)), label="buffer 0").wait()
    assert time.monotonic() - start < 5
    assert queue._thread.daemon  # so that a process with a hanging collective can end
    gate.set()
    queue.close()


@pytest.mark.gpu
def test_a_stream_runs_behind_its_callers_kernels() -> None:
    device = torch.device("cuda", 0)
    queue = StreamQueue(device)
    tensor_N = torch.zeros(1 << 24, device=device)
    for _ in range(50):
        tensor_N.add_(1)

    def double_() -> None:
        tensor_N.mul_(2)

    queue.submit(double_, label="double").wait()
    tensor_N.add_(1)
    assert float(tensor_N.min()) == float(tensor_N.max()) == 101.0
    queue.close()
