"""One process: choosing device, backend, algorithm and wire, and what cannot be summed."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from one_rank import alone, transport_over
from played_gpus import PlayedGpus

from bigbatch.comm.algorithms.by_name import ALGORITHMS
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends import horovod, host_staging
from bigbatch.comm.backends.base import Capabilities, Group
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.communicator import make_communicator
from bigbatch.comm.connect import choose_device, connect, gpu_uuid, with_index
from bigbatch.comm.connection import Connection, abort_connection, open_connections
from bigbatch.comm.gradients.broadcast import all_reduce, broadcast_parameters, send_object
from bigbatch.comm.rendezvous.alone import AloneControl
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.topology import make_topology
from bigbatch.comm.transport import make_transport
from bigbatch.errors import LOST, CommError
from bigbatch.trainer.machine.gpu_driver import find_gpu, read_clock
from bigbatch.user_settings import LISTED_VARIABLE, list_gpu_first

CPU = torch.device("cpu")
TABLE = HybridTable((HybridRow(64, "doubling"), HybridRow(None, "ring")))


class NativeBackend(SingleBackend):
    """Can neither send messages nor sum bf16."""

    name = "collectives-only"
    capabilities = Capabilities(("cpu",), (torch.float32, torch.float16), has_messages=False)


# --- sums ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("num_elements", [0, 1000])
def test_sum_over_one_rank_is_exact(algorithm: str, dtype: torch.dtype, num_elements: int) -> None:
    alone = connect(algorithm=algorithm, table=TABLE, env=ALONE, device=CPU)
    values_N = torch.randn(num_elements, generator=torch.Generator().manual_seed(1)).to(dtype)
    for tensor_N in (values_N.clone(), alone.allocate(num_elements, dtype).copy_(values_N)):
        assert alone.sum_(tensor_N, label="test") is tensor_N
        assert torch.equal(tensor_N, values_N)


class HostBackend(SingleBackend):
    """A transport of host tensors; its sum doubles, to distinguish it from a copy."""

    name = "host-only"
    capabilities = Capabilities(("cpu",))

    def all_reduce_(self, tensor_N: torch.Tensor, group: Group) -> None:
        tensor_N.numpy()[:] *= 2


def test_connection_and_transport_each_work_before_the_next_object_exists() -> None:
    control = AloneControl(ALONE, timeout_seconds=60.0, warn_seconds=10.0)
    connection = Connection(ALONE, control, HostBackend(), make_topology(["here"], rank=0))
    assert (connection.rank, connection.world_size, connection.gather((1, 2))) == (0, 1, [[1, 2]])
    connection.agree("a text", "same")
    transport = make_transport(connection, device=CPU)
    first_N, second_N = transport.allocate((2, torch.float32), (3, torch.int64))
    transport.start(lambda tensor_N: tensor_N.add_(1), first_N, label="own", algorithm="own", wire=Wire()).wait()
    assert (first_N.tolist(), second_N.tolist()) == ([1.0, 1.0], [0, 0, 0])
    transport.release(second_N)
    assert make_communicator(transport, "native").sum_(first_N, label="sum").tolist() == [2.0, 2.0]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_sum_of_a_scalar_tensor_is_in_place(requires_grad: bool) -> None:
    """Such as a loss that is part of a graph."""
    two = make_communicator(transport_over(HostBackend()), "native")
    loss = torch.tensor(1.5, requires_grad=requires_grad) * 1.0
    assert two.sum_(loss, label="loss") is loss
    assert loss.item() == 3.0


@pytest.mark.parametrize("hosts", [["a"], ["a", "b"]])
def test_sum_of_a_gpus_tensor_goes_by_way_of_the_host_for_a_rank_alone_in_its_node_group(
    hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares no memory with anyone, and yet a socket cannot read a GPU's."""
    device, content_N = torch.device("meta"), torch.tensor([1.0, 2.0, 3.0])  # of a GPU's tensor, which is on no device
    staging = SimpleNamespace(pin=lambda host_N: None, ready=lambda: None, join=lambda: None)
    staging.fetch = lambda host_N, device_N, ready: host_N.copy_(content_N)
    staging.copy_back = lambda device_N, host_N: content_N.copy_(host_N)
    monkeypatch.setattr(host_staging, "HostStaging", lambda device: staging)
    env, control = ALONE, AloneControl(ALONE, timeout_seconds=60.0, warn_seconds=10.0)
    connection = Connection(env, control, HostBackend(), make_topology(hosts, rank=0))
    staged = make_communicator(make_transport(connection, device=device), "native")
    staged.sum_(torch.zeros(3, device=device), label="buffer 0")
    assert content_N.tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sum_over_one_rank_rounds_as_many_do(algorithm: str) -> None:
    """So that a run on one rank replays what the wire does to the gradients."""
    alone = connect(algorithm=algorithm, table=TABLE, wire_dtype="float16", predivide=2.0, env=ALONE, device=CPU)
    values_N = torch.tensor([1.0, 1.0 + 2.0**-12, 100_000.0, 1e-9])
    sum_N = alone.sum_(values_N.clone(), label="test")
    assert sum_N.tolist() == [1.0, 1.0, (values_N[2] / 2).half().item() * 2, 0.0]


def test_with_algorithm_takes_another_algorithm_or_wire_over_the_same_ranks() -> None:
    first = connect(env=ALONE, device=CPU)
    second = first.with_algorithm("ring", wire=Wire(torch.float16))
    assert (first.algorithm, first.wire, second.algorithm, second.wire) == ("native", Wire(), "ring", second.wire)
    assert second.transport is first.transport, "the connection, and so the rank, is not copied"
    assert second.with_algorithm("hybrid", table=TABLE).algorithm_for(torch.zeros(16)) == "doubling"
    assert second.with_algorithm("hybrid", table=TABLE).algorithm_for(torch.zeros(17)) == "ring"
    assert second.algorithm_for(torch.zeros(17)) == "ring"


def test_with_algorithm_and_allocate_are_watched_where_nccl_waits_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups that connect and windows that are made by all ranks stand in no queue."""
    watching, seen = list[str](), list[str]()

    @contextmanager
    def during(label: str) -> Iterator[None]:
        watching.append(label)
        yield
        watching.pop()

    def note(result: object) -> object:
        seen.append(" ".join(watching))
        return result

    monkeypatch.setattr(SingleBackend, "new_group", lambda backend, families: note(Group((0,))))
    inspector: Any = SimpleNamespace(during=during)
    registered: Any = SimpleNamespace(allocate=lambda num_elements, dtype: note(torch.zeros(num_elements)))
    make_communicator(transport_over(watch=inspector, registered=registered), "doubling").allocate(1, torch.float32)
    assert re.search("doubling", seen[0])
    assert seen[1]
    assert not watching


def test_close_of_a_world_of_one_under_mpirun_starts_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # not installed
    connect(env=ProcessEnv("openmpi", 0, 1, 0, 1, "here", None), device=CPU).close()


def test_connection_of_one_process_can_be_aborted_so_that_others_join_it() -> None:
    communicator = connect(backend="tcp", env=ALONE)
    abort_connection(communicator.connection.control)
    assert communicator.connection.control not in open_connections


@pytest.mark.slow
@pytest.mark.parametrize(
    ("abort", "why"),
    [("time.sleep(60)", "within 0.5 s"), ("(_ for _ in ()).throw(CommError('NCCL error: x'))", "(NCCL error: x)")],
)
def test_process_ends_as_a_lost_rank_if_its_library_does_not_abort(abort: str, why: str) -> None:
    script = (
        "import time\n"
        "from bigbatch.comm.connect import connect\n"
        "from bigbatch.comm.connection import abort_connection\n"
        "from bigbatch.comm.rendezvous.environ import ALONE\n"
        "from bigbatch.errors import CommError\n"
        "communicator = connect(env=ALONE, timeout_seconds=0.5)\n"
        f"type(communicator.transport.backend).abort = lambda self: {abort}\n"
        "abort_connection(communicator.connection.control)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == LOST, ended.stderr
    assert f"single did not abort its operations {why}: this process ends as a lost rank" in ended.stderr


# --- what is refused ---


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.zeros(3, device="meta"), ("on meta", "on cpu")),
        (torch.zeros(3, dtype=torch.int32), ("single", "torch.int32", "float64, float32, float16, bfloat16")),
        (torch.zeros(3, dtype=torch.complex64), ("single", "torch.complex64", "float64, float32, float16, bfloat16")),
        (torch.zeros(2, 2), ("contiguous", "shape (2, 2)")),
        (torch.zeros(4)[::2], ("contiguous", "shape (2,)")),
        (torch.zeros(()), ("contiguous", "shape ()")),
    ],
)
def test_sum_refuses_what_cannot_be_summed(tensor: torch.Tensor, named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*named)):
        connect(env=ALONE, device=CPU).start(tensor, label="test")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"buffers": "symmetric"}, ("buffers", "symmetric", "NCCL", "tcp")),
        ({"buffers": "pinned"}, ("buffers", "pinned", "torch, registered, symmetric")),
        ({"backend": "nvlink"}, ("backend", "'nvlink'", "auto, nccl, gloo, mpi, tcp, horovod")),
        ({"algorithm": "tree"}, ("algorithm", "'tree'", "auto, native, ring")),
        ({"algorithm": "hybrid"}, ("algorithm", "'hybrid'", "bigbatch comm tune")),
        ({"reduce_dtype": "float64"}, ("reduce_dtype", "'float64'", "fp32 or wire")),
        ({"wire_dtype": "int4"}, ("wire_dtype", "'int4'", "float32, float16, bfloat16", "null")),
        ({"predivide": 0.0}, ("predivide=0.0 ",)),
        ({"predivide": float("nan")}, ("predivide=nan ",)),
        ({"warn_seconds": 0.0}, ("warn_seconds=0", "timeout_seconds=60")),
        ({"warn_seconds": float("nan")}, ("warn_seconds=nan", "timeout_seconds=60")),
        ({"warn_seconds": 60.5}, ("warn_seconds=60.5", "timeout_seconds=60")),
        ({"timeout_seconds": float("inf")}, ("timeout_seconds=inf", "below 1e+09")),
        ({"timeout_seconds": 1e10}, ("timeout_seconds=1e+10", "below 1e+09")),
        ({"meeting_seconds": float("inf")}, ("meeting_seconds=inf", "below 1e+09")),
        ({"backend": "mpi", "interface": "eth0"}, ("'eth0'", "'mpi'", "OMPI_MCA_btl_tcp_if_include")),
        ({"backend": "horovod", "interface": "eth0"}, ("'eth0'", "'horovod'", "OMPI_MCA_btl_tcp_if_include")),
    ],
)
def test_connect_refuses_unknown_and_impossible_choices(options: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*named)):
        connect(env=ALONE, device=CPU, **options)


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("gloo", "cuda:0"), ("horovod", "cuda:0")])
def test_backend_for_other_devices_is_refused(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "import_horovod", lambda: SimpleNamespace(nccl_built=lambda: False))
    with pytest.raises(ValueError, match=naming(f"'{backend}'", f"on {device}")):
        connect(backend=backend, env=ALONE, device=torch.device(device))


def test_backend_without_messages_has_its_own_algorithm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbatch.comm.connect.SingleBackend", NativeBackend)
    met = connect(env=ALONE, device=CPU)
    assert (met.transport.algorithms, met.transport.memory) == (("native",), None)
    assert met.sum_(torch.ones(2), label="test").tolist() == [1.0, 1.0]
    for algorithm in ("ring", "hierarchical", "sharded", "doubling"):
        with pytest.raises(ValueError, match=naming(f"'{algorithm}'", "collectives-only", "native")):
            met.with_algorithm(algorithm)
    with pytest.raises(ValueError, match=naming("collectives-only", "torch.bfloat16", "float32, float16")):
        met.start(torch.ones(2, dtype=torch.bfloat16), label="test")
    with pytest.raises(ValueError, match=naming("collectives-only", "bfloat16", "wire_dtype")):
        connect(wire_dtype="bfloat16", env=ALONE, device=CPU)


# --- the device ---


def test_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend in ("auto", "gloo", "mpi", "tcp", "horovod"):
        assert choose_device(ALONE, backend=backend) == CPU
    with pytest.raises(CommError, match=naming("1 rank on", "here", "0 GPUs", "--comm.backend gloo")):
        choose_device(ALONE, backend="nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    third = ProcessEnv("openmpi", 6, 8, 2, 4, "here", None)
    for backend in ("auto", "nccl", "tcp", "mpi"):
        assert choose_device(third, backend=backend) == torch.device("cuda", 2)
    assert chosen == [torch.device("cuda", 2)] * 4
    for has_nccl in (False, True):
        hvd = SimpleNamespace(nccl_built=lambda has_nccl=has_nccl: has_nccl)
        monkeypatch.setattr(horovod, "import_horovod", lambda hvd=hvd: hvd)
        chosen_for_horovod = torch.device("cuda", 2) if has_nccl else CPU
        assert (choose_device(third, backend="gloo"), choose_device(third, backend="horovod")) == (
            CPU,
            chosen_for_horovod,
        )
    with pytest.raises(CommError, match=naming("8 ranks", "here", "4 GPUs", "--comm.backend gloo")):
        choose_device(ProcessEnv("openmpi", 6, 8, 6, 8, "here", None))


@pytest.mark.parametrize("local_rank", [0, 3])
def test_device_that_is_the_only_one_in_sight_is_this_ranks_own(
    local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm shows each rank its GPU with --gpus-per-task; at the meeting the ranks check that none is shared."""
    gpus = PlayedGpus(1, monkeypatch=monkeypatch, uuids="f")
    bound = ProcessEnv("srun", local_rank, 4, local_rank, 4, "here", None)
    device = choose_device(bound)
    assert (device, gpu_uuid(device), gpus.contexts) == (torch.device("cuda", 0), "GPU-f", {0})
    assert gpu_uuid(CPU) == ""


def test_gpus_that_rocm_cannot_tell_apart_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of "XX", by which ROCm names each GPU that has no UUID."""
    PlayedGpus(1, monkeypatch=monkeypatch, uuids=["58580000-0000-0000-0000-000000000000"])
    assert gpu_uuid(torch.device("cuda", 0)) == ""


@pytest.mark.parametrize(
    ("stated", "listed"), [(None, "2,3,0,1"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d,GPU-a,GPU-b")]
)
def test_device_that_is_listed_first_is_this_ranks_own(
    stated: str | None, listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlayedGpus(4, monkeypatch=monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(LISTED_VARIABLE, "")  # restored afterwards
    if stated is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", stated)
    third = ProcessEnv("openmpi", 6, 8, 2, 4, "here", None)
    list_gpu_first(2, num_ranks=4, count=4)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == listed
    assert choose_device(third) == torch.device("cuda", 0)
    fourth = ProcessEnv("openmpi", 7, 8, 3, 4, "here", None)
    assert choose_device(fourth) == torch.device("cuda", 3), "a child with another rank chooses from the list"
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        assert choose_device(third) == torch.device("cuda", 2), "so does a rank of a job that this process starts"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert choose_device(third) == torch.device("cuda", 2), "another process has stated others since"


def test_device_without_an_index_is_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on it say cuda:1, and are compared with the device on which ranks communicate."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [with_index(torch.device(name)).index for name in ("cuda", "cuda:0", "cpu")] == [1, 0, None]


DRIVER = "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver"


def test_device_driver_too_old_for_torch_is_said_instead_of_training_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warn() -> bool:
        warnings.warn(f"CUDA initialization: {DRIVER}", stacklevel=1)
        return False

    def fail() -> None:
        raise RuntimeError(DRIVER)

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for backend in ("auto", "nccl", "tcp", "mpi"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(
                CommError,
                match=naming("CUDA 12.8", "CUDA 13.0", "driver", "make train CUDA=12", "gloo", "--device cpu"),
            ):
                choose_device(ALONE, backend=backend)
    for proposed in (choose_device(ALONE, backend="gloo"), choose_device(replace(ALONE, keeps_to_cpu=True))):
        assert proposed == CPU, "as the message proposes"


QUESTION = "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before that set an error? "


@pytest.mark.parametrize(
    ("said", "is_broken"),
    [
        (f"{QUESTION}Error 802: system not yet initialized", True),
        (f"{QUESTION}Error 34: CUDA driver is a stub library", False),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", True),
        ("Found no NVIDIA driver on your system.", False),
        ("No CUDA GPUs are available", False),
    ],
)
def test_device_that_does_not_start_is_said_instead_of_training_on_the_cpu(
    said: str, is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node of many would otherwise wait for the others by another backend."""

    def fail() -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    if not is_broken:
        assert choose_device(ALONE) == CPU
        return
    with pytest.raises(CommError, match=naming("do not start", said.rpartition("? ")[2], "nvidia-smi", "gloo")):
        choose_device(ALONE)
    assert choose_device(replace(ALONE, keeps_to_cpu=True)) == CPU


def test_device_of_a_torch_for_rocm_is_called_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's GPUs; nothing asks for a version of CUDA or for NVIDIA's driver."""
    PlayedGpus(2, monkeypatch=monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.1.25424", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = choose_device(ALONE)
    assert device == torch.device("cuda", 0)
    assert read_clock(device) is None
    assert find_gpu(device) is None


def test_device_without_any_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("not compiled with CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    assert choose_device(ALONE) == CPU


# --- texts ---


@pytest.mark.parametrize(
    ("theirs", "difference"), [("a: 1\nseed: 2", "'seed: 2' against 'seed: 1'"), ("a: 1\nseed: 1\nb", "one is longer")]
)
def test_agree_names_the_odd_rank_and_the_first_difference(
    theirs: str, difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([['"digest"', '"another"'], ["a: 1\nseed: 1", theirs]])
    two = transport_over(control=JobControl(ALONE, timeout_seconds=60)).connection
    monkeypatch.setattr(two.control, "gather_text", lambda text: next(answers))
    with pytest.raises(CommError, match=naming("rank 1", "rank 0", "the config", difference)):
        two.agree("the config", "a: 1\nseed: 1")


def test_every_operation_of_all_ranks_is_counted_so_that_one_that_left_is_noticed() -> None:
    one, begun = alone(), list[int]()
    one.connection.control.detector.begin = lambda: begun.append(1)  # type: ignore[method-assign]
    one.sum_(torch.ones(1), label="loss")
    all_reduce(torch.ones(1), one)
    broadcast_parameters({"weight": torch.ones(1)}, one)
    assert len(begun) == 3
    send_object({"epoch": 3}, one, source=0, to=())
    assert len(begun) == 3, "not an operation of all ranks"
