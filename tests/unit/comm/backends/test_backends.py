"""Transports without peers: the one of a single process, and how the others fail. With peers: tests/parallel."""

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from error_texts import naming
from played_gpus import PlayedEvent, PlayedGpus, PlayedStream
from silent_ranks import half_a_job, hurry_count

from bigbatch.comm import connection
from bigbatch.comm.backends import horovod, in_flight, mpi
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.backends.tcp import TcpBackend
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous import addresses, by_mpi, meeting
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv
from bigbatch.comm.rendezvous.failure_log import LOG
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.meeting import listen
from bigbatch.errors import CommError, PeerLostError

CPU = torch.device("cpu")
TWO = ProcessEnv("torchrun", 0, 2, 0, 2, "here", ("127.0.0.1", 0))
UNLAUNCHED = ProcessEnv("openmpi", 0, 2, 0, 2, "here", None)
LOST = r".* \d+\.\d s.*rank 1 on node1 .*control"
"""What is named of a wait that ended for want of rank 1."""


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry_count(monkeypatch)
    monkeypatch.setattr(meeting, "_met", {})


# --- one process ---


def test_single_backends_transfers_are_copies() -> None:
    backend = SingleBackend()
    group = backend.new_group([[0]])
    source_N, target_N = torch.arange(3.0), torch.zeros(3)
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
    with pytest.raises(ValueError, match=naming("only rank", "send")):
        SingleBackend().start_send(torch.ones(1), to=0)
    with pytest.raises(ValueError, match=naming("only rank", "receive")):
        SingleBackend().start_receive(torch.ones(1), source=0)


# --- tcp ---


def test_tcp_gives_up_after_the_time_limit_and_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbatch.comm.backends.links.POLL_SECONDS", 0.1)
    backend = TcpBackend(TWO, half_a_job(TWO, 0.5))
    work = backend.submit(lambda: backend.all_reduce_(torch.ones(10), backend.world), label="buffer 0")
    with pytest.raises(PeerLostError, match=rf"rank 0: buffer 0 {LOST}"):
        work.wait()


def test_tcp_heeds_the_failure_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbatch.comm.backends.links.POLL_SECONDS", 0.1)
    met = half_a_job(TWO, 60)
    backend = TcpBackend(TWO, met)
    met.store.append(LOG, '["failed", 1, "lost"]\n["verdict", 1, [], "all ranks still answer"]\n')
    work = backend.submit(lambda: backend.all_reduce_(torch.ones(10), backend.world), label="buffer 0")
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=naming("rank 0: buffer 0", "all ranks still", "control")):
        work.wait()
    assert time.monotonic() - start < 30, "not at its own limit"


# --- torch.distributed ---


def test_nccl_without_room_in_shared_memory_says_how_to_get_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are NCCL's, of a container with Docker's 64 MB."""

    def fail(*_: object, **__: object) -> None:
        raise torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:94, unhandled system error, NCCL version 2.30.7\nncclSystemError: System "
            "call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\nError while "
            "creating shared memory segment /dev/shm/nccl-XyZ1 (size 33030528), error: No space left on device (28)"
        )

    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    with pytest.raises(CommError, match=naming("nccl", "2 ranks", "/dev/shm", "--shm-size 1g")):
        TorchDistributedBackend(TWO, half_a_job(TWO, 1.0), library="nccl", device=CPU)


def test_gloo_on_an_interface_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that both are put back after the test
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with pytest.raises(CommError, match=naming("rank 0 on here", "gloo", "2 ranks", "ib7", "comm.interface")):
        TorchDistributedBackend(replace(TWO, interface="ib7"), half_a_job(TWO, 1.0), library="gloo", device=CPU)


def test_torch_distributed_last_barrier_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("connection closed")

    met = half_a_job(TWO, 1.0)
    backend = TorchDistributedBackend(ALONE, JobControl(ALONE, timeout_seconds=60), library="gloo", device=CPU)
    try:
        monkeypatch.setattr(torch.distributed, "barrier", fail)
        backend._queue._explain = met.detector.make_error_and_stop_requests  # type: ignore[union-attr]
        with pytest.raises(PeerLostError, match=naming("rank 0", "barrier", "rank 1 on node1")):
            backend.close()
    finally:
        torch.distributed.destroy_process_group()


# --- MPI without MPI ---


def test_mpi_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CommError, match=naming("mpi4py", "pip install -e '.[mpi]'")):
        by_mpi.import_mpi()


def test_mpi4py_without_a_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass\n")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nlong story')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(CommError, match=naming("(cannot load MPI library)", "pip install -e '.[mpi]'")):
        by_mpi.import_mpi()
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name, raising=False)


STARTED = {"Is_initialized": lambda: True, "Is_finalized": lambda: False}


def fake_mpi(
    monkeypatch: pytest.MonkeyPatch, *, rank: int, size: int, bcast: Callable[..., Any] = lambda answer, root: answer
) -> None:
    world = SimpleNamespace(rank=rank, size=size, bcast=bcast)
    monkeypatch.setattr(by_mpi, "import_mpi", lambda: SimpleNamespace(COMM_WORLD=world, **STARTED))


@pytest.mark.parametrize("state", [{"Is_initialized": lambda: False}, {"Is_finalized": lambda: True}])
def test_mpi_that_a_script_has_not_started_or_has_ended_is_refused(
    state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI itself would abort the job."""
    monkeypatch.setattr(by_mpi, "import_mpi", lambda: SimpleNamespace(**STARTED | state))
    with pytest.raises(CommError, match=naming("MPI.Init()", "Finalize()")):
        connect(backend="mpi", env=UNLAUNCHED, device=CPU)


def test_mpi_library_that_sees_another_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, rank=0, size=1)
    with pytest.raises(CommError, match=naming("openmpi", "rank 0 of 2", "rank 0 of 1", "mpirun")):
        connect(backend="mpi", env=UNLAUNCHED, device=CPU)


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_mpi_meeting_point_of_one_host_is_a_free_port_on_loopback(
    loopback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPv6's on a host without IPv4."""
    if loopback == "::1" and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")
    fake_mpi(monkeypatch, rank=0, size=2)
    monkeypatch.setattr(addresses, "loopback", lambda: loopback)
    met, again = (by_mpi.meet_by_mpi(UNLAUNCHED, timeout_seconds=60) for _ in range(2))
    assert len(bytes.fromhex(met.secret.decode())) == 32
    assert met.secret != again.secret
    assert met.master is not None
    assert met.listener is not None
    with pytest.raises(OSError, match="in use"):  # rank 0 holds it until its store serves
        listen(*met.master)
    with socket.socket(fileno=met.listener) as holder:
        assert holder.getsockname()[:2] == met.master == (loopback, met.master[1])


@pytest.mark.parametrize("is_scripts", [True, False])
def test_mpi_of_a_script_is_left_to_it(is_scripts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that imported MPI before bigbatch may use it after close(), and ends it itself."""
    ended: list[str] = []
    library = SimpleNamespace(Is_finalized=lambda: False, Finalize=lambda: ended.append("by bigbatch"))
    package = SimpleNamespace(rc=SimpleNamespace(finalize=None), MPI=library)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    if is_scripts:
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", library)
    monkeypatch.setattr(by_mpi, "scripts_mpi", by_mpi.scripts_mpi.__wrapped__)
    monkeypatch.setattr(mpi, "scripts_mpi", by_mpi.scripts_mpi)
    monkeypatch.setattr(connection, "open_connections", {})
    monkeypatch.setattr(connection, "_aborted", [])
    monkeypatch.setattr(connection, "_closed_over_mpi", [])
    connection.end_mpi()
    assert not ended, "no connection was over MPI"
    connection._closed_over_mpi.append(os.getpid())
    connection._aborted.append(SingleBackend())
    connection.end_mpi()
    assert not ended, "a failed rank ends at once"
    connection._aborted.clear()
    connection.end_mpi()
    assert (ended, package.rc.finalize) == (([], None) if is_scripts else (["by bigbatch"], False))


@pytest.mark.parametrize("interface", [None, "ib7"])
def test_mpi_meeting_tells_all_ranks_that_rank_0_has_no_address(
    interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mpi(monkeypatch, rank=0, size=2)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: found)
    named = naming("127.0.1.1", "/etc/hosts") if interface is None else naming("'ib7'", "lo", "comm.interface")
    env = ProcessEnv("openmpi", 0, 2, 0, 1, "here", None, interface=interface)
    with pytest.raises(CommError, match=named):
        by_mpi.meet_by_mpi(env, timeout_seconds=60)


def forever(*_: object, **__: object) -> None:
    Event().wait(60)


def test_mpi_meeting_ends_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, rank=0, size=2, bcast=forever)
    with pytest.raises(CommError, match=r"rank 0: .*MPI .* 0\.2 s"):
        by_mpi.meet_by_mpi(UNLAUNCHED, timeout_seconds=0.2)


def mpi_backend(monkeypatch: pytest.MonkeyPatch, **calls: Callable[..., Any]) -> mpi.MpiBackend:
    monkeypatch.setattr(in_flight, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(mpi, "is_cuda_aware", lambda: False)
    # the other rank runs the same operations
    calls.setdefault("Allgather", lambda mine, everyone: everyone.__setitem__(slice(None), np.tile(mine, 2)))
    world = SimpleNamespace(rank=0, size=2, Dup=lambda: SimpleNamespace(rank=0, size=2, **calls))
    vars(world).update(calls)
    library = SimpleNamespace(**STARTED, COMM_WORLD=world, Status=SimpleNamespace, BYTE="byte")
    for module in (mpi, by_mpi):
        monkeypatch.setattr(module, "import_mpi", lambda: library)
    return mpi.MpiBackend(UNLAUNCHED, half_a_job(TWO, 0.3))


@pytest.mark.slow
def test_mpi_setup_ends_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLostError, match=rf"rank 0: MPI's copy .*{LOST}"):
        mpi_backend(monkeypatch, Dup=forever)
    backend = mpi_backend(monkeypatch, Split=forever)
    with pytest.raises(PeerLostError, match=rf"rank 0: MPI's split .*{LOST}"):
        backend.new_group([[0], [1]])


def test_mpi_message_must_have_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI itself refuses a longer one; a shorter one would leave old values behind."""

    class Arrived:
        """A message of eight bytes."""

        def Wait(self, status: SimpleNamespace) -> None:
            status.Get_count = {"byte": 8}.__getitem__

    backend = mpi_backend(monkeypatch, Irecv=lambda data, source: Arrived())
    backend.start_receive(torch.zeros(2), source=1).wait()
    with pytest.raises(CommError, match=naming("rank 1", " 8 bytes ", " 12 ")):
        backend.start_receive(torch.zeros(3), source=1).wait()


def test_mpi_reads_a_gpus_memory_after_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which stream is waited for, and when; that it is the right one is for a machine with a GPU."""
    PlayedGpus(2, monkeypatch=monkeypatch)
    order: list[str] = []
    monkeypatch.setattr(PlayedEvent, "synchronize", lambda event: order.append(f"kernels of {event.stream.device}"))
    monkeypatch.setattr(PlayedStream, "synchronize", lambda stream: order.append(f"all of {stream.device}"))
    backend = mpi_backend(monkeypatch)
    backend._gpu = torch.device("cuda", 1)
    tensor_N: Any = SimpleNamespace(is_cuda=True, device=backend._gpu)

    def operation() -> None:
        assert mpi._for_mpi(tensor_N) is tensor_N
        order.append("MPI reads")

    backend.submit(operation, label="sum").wait()
    assert order == ["kernels of cuda:1", "all of cuda:1", "MPI reads", "all of cuda:1"]


def test_mpi_is_given_the_gpu_only_if_cuda_aware(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi_backend(monkeypatch)
    gpu = torch.device("cuda", 1)
    assert mpi.MpiBackend(UNLAUNCHED, half_a_job(TWO, 1.0), device=gpu)._gpu is None
    monkeypatch.setattr(mpi, "is_cuda_aware", lambda: True)
    assert mpi.MpiBackend(UNLAUNCHED, half_a_job(TWO, 1.0), device=gpu)._gpu == gpu
    assert mpi.MpiBackend(UNLAUNCHED, half_a_job(TWO, 1.0), device=CPU)._gpu is None


# --- Horovod without Horovod ---


@pytest.mark.slow
def test_horovod_setup_ends_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "POLL_SECONDS", 0.05)
    hvd = SimpleNamespace(is_initialized=lambda: False, nccl_built=lambda: False, rank=lambda: 0, size=lambda: 2)
    vars(hvd).update(init=forever, global_process_set="all", add_process_set=forever)
    monkeypatch.setattr(horovod, "import_horovod", lambda: hvd)
    monkeypatch.setattr(horovod, "mpi_world", lambda env: None)
    with pytest.raises(PeerLostError, match=rf"rank 0: start of Horovod {LOST}"):
        horovod.HorovodBackend(TWO, half_a_job(TWO, 0.3), device=CPU)
    hvd.init, hvd.shutdown = lambda process_sets: None, lambda: stopped.append(True)
    backend = horovod.HorovodBackend(TWO, half_a_job(TWO, 0.3), device=CPU)
    assert backend.new_group([[0, 1]]).handle == "all"
    with pytest.raises(PeerLostError, match=rf"rank 0: Horovod's process set of 1 {LOST}"):
        backend.new_group([[0], [1]])
    stopped: list[bool] = []
    horovod.HorovodBackend(TWO, half_a_job(TWO, 0.3), device=CPU).abandon()
    assert stopped == [True]
