"""Transports without peers: the one of a single process, and how the others fail. With peers: tests/parallel."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bigbatch.comm import addresses, control
from bigbatch.comm.backends import mpi
from bigbatch.comm.backends.base import ALL_DTYPES, CommError, PeerLostError
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.backends.tcp import TcpBackend
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import connect
from bigbatch.comm.control import Control, listen
from bigbatch.comm.environ import ProcessEnv

CPU = torch.device("cpu")
TWO = ProcessEnv("torchrun", 0, 2, 0, 2, "here", ("127.0.0.1", 0))
UNLAUNCHED = ProcessEnv("openmpi", 0, 2, 0, 2, "here", None)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank will answer: do not wait for it."""
    monkeypatch.setattr(control, "ROLL_CALL_SECONDS", 0.2)
    monkeypatch.setattr(control, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(control, "_met", {})


def half_a_job(seconds: float = 1.0) -> Control:
    """Rank 0 of a job of two; rank 1 has said where it runs, and is silent from now on."""
    met = Control(TWO, timeout_seconds=seconds)
    met.store.set("bigbatch/host/1", "node1")
    return met


# --- one process ---


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_the_single_backends_transfers_are_copies(dtype: torch.dtype) -> None:
    backend = SingleBackend()
    group = backend.new_group([[0]])
    source_N, target_N = torch.arange(3).to(dtype), torch.zeros(3, dtype=dtype)
    backend.all_gather(target_N, source_N, group)
    assert torch.equal(target_N, source_N)
    backend.reduce_scatter(target_N, 2 * source_N, group)
    assert torch.equal(target_N, 2 * source_N)
    backend.start_exchange(send=source_N, to=0, receive=target_N, source=0).wait()
    assert torch.equal(target_N, source_N)
    backend.all_reduce_(target_N, group)
    backend.reduce_(target_N, group, root=0)
    backend.broadcast_(target_N, group, root=0)
    assert torch.equal(target_N, source_N)
    assert dtype in backend.capabilities.dtypes


def test_a_world_of_one_has_no_peers() -> None:
    with pytest.raises(ValueError, match="a world of one has no rank to send to"):
        SingleBackend().start_send(torch.ones(1), to=0)
    with pytest.raises(ValueError, match="a world of one has no rank to receive from"):
        SingleBackend().start_receive(torch.ones(1), source=0)


# --- tcp ---


def test_tcp_gives_up_after_the_time_limit_and_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbatch.comm.backends.links.POLL_SECONDS", 0.1)
    backend = TcpBackend(TWO, half_a_job(0.5))
    work = backend.submit(lambda: backend.all_reduce_(torch.ones(10), backend.world), label="buffer 0")
    expected = (
        r"rank 0: buffer 0 failed after 0\.\d s; no answer from rank 1 on node1 \(control: some rank has not come to it"
    )
    with pytest.raises(PeerLostError, match=expected):
        work.wait()


def test_tcp_heeds_the_failure_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbatch.comm.backends.links.POLL_SECONDS", 0.1)
    met = half_a_job(60)
    backend = TcpBackend(TWO, met)
    met.store.set("bigbatch/alive/1", "1")
    met.store.set("bigbatch/failed", "1")
    work = backend.submit(lambda: backend.all_reduce_(torch.ones(10), backend.world), label="buffer 0")
    with pytest.raises(PeerLostError, match=r"all ranks still answer \(control: another rank reports a failure"):
        work.wait()


def test_an_interface_that_does_not_exist_is_refused_before_any_sum() -> None:
    with pytest.raises(CommError, match=r"comm.interface 'ib7': \S+ has no such network interface; it has .*\blo\b"):
        TcpBackend(TWO, half_a_job(), interface="ib7")


# --- torch.distributed ---


def test_gloo_without_its_peers_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(CommError, match=r"rank 0 on here: gloo could not connect 2 ranks: .*; set comm.interface to"):
        TorchDistributedBackend(TWO, half_a_job(), library="gloo", device=CPU)


def test_gloo_on_an_interface_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that both are put back after the test
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with pytest.raises(CommError, match=r"rank 0 on here: gloo could not connect 2 ranks: .*ib7.*set comm.interface"):
        TorchDistributedBackend(TWO, half_a_job(), library="gloo", device=CPU, interface="ib7")


def test_a_last_barrier_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("connection closed")

    alone = ProcessEnv("none", 0, 1, 0, 1, "here", None)
    met = half_a_job()
    backend = TorchDistributedBackend(alone, Control(alone, timeout_seconds=5), library="gloo", device=CPU)
    try:
        monkeypatch.setattr(torch.distributed, "barrier", fail)
        backend._control = met
        with pytest.raises(PeerLostError, match=r"rank 0: the last barrier failed .* no answer from rank 1 on node1"):
            backend.close()
    finally:
        torch.distributed.destroy_process_group()


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
    with pytest.raises(CommError, match="openmpi started rank 0 of 2, but MPI sees rank 0 of 1: start the job with"):
        connect(backend="mpi", env=UNLAUNCHED, device=CPU)


def test_the_meeting_point_of_one_host_is_a_free_port_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, rank=0, size=2)
    address, port = mpi.meet_by_mpi(UNLAUNCHED)
    with listen(address, port):
        assert address == "127.0.0.1"


@pytest.mark.parametrize("interface", [None, "ib7"])
def test_all_ranks_hear_that_rank_0_has_no_address(interface: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, rank=0, size=2)
    monkeypatch.setattr(addresses.socket, "gethostbyname", lambda _: "127.0.1.1")
    expected = "which other nodes cannot reach: mend /etc/hosts" if interface is None else "'ib7': .* has no such"
    with pytest.raises(CommError, match=expected):
        mpi.meet_by_mpi(ProcessEnv("openmpi", 0, 2, 0, 1, "here", None), interface=interface)
