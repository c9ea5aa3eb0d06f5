"""Connect the ranks of a job: connect(), its checks, and the backend that it makes."""

import re
import sys
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bigbatch.comm.algorithms.by_name import SizeTable
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import require_type
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.communicator import Communicator, make_communicator
from bigbatch.comm.connection import Connection, close_at_exit
from bigbatch.comm.rendezvous.alone import AloneControl
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv, read_process_env
from bigbatch.comm.rendezvous.gpus import ON_CPU, too_few_gpus
from bigbatch.comm.rendezvous.topology import make_topology
from bigbatch.comm.transport import make_transport
from bigbatch.cores import describe_spinning, is_spinning_stated
from bigbatch.errors import CommError, PeerLostError, first_line, show_uncaught, tell
from bigbatch.parts import load
from bigbatch.user_settings import lists_gpu_first, may_share_gpus

if TYPE_CHECKING:
    from bigbatch.comm.rendezvous.regroup import Group

TRANSPORTS = {
    "nccl": "bigbatch.comm.backends.torch_distributed.TorchDistributedBackend",
    "gloo": "bigbatch.comm.backends.torch_distributed.TorchDistributedBackend",
    "mpi": "bigbatch.comm.backends.mpi.MpiBackend",
    "tcp": "bigbatch.comm.backends.tcp.TcpBackend",
    "horovod": "bigbatch.comm.backends.horovod.HorovodBackend",
}
"""Backend of several ranks -> import path of its class. One process alone uses SingleBackend."""
SEVERAL_RANKS = "bigbatch.comm.several_ranks.join"
BUFFERS = ("torch", "registered", "symmetric")
BACKENDS = ("auto", *TRANSPORTS)
HEALING = ("tcp", "gloo", "nccl")
"""Backends that can abort operations without ending the process."""
WARN_SECONDS = 10.0
MAX_SECONDS = 1e9
"""Locks and timers of Python refuse waits of 1e10."""
BROKEN = re.compile(r"CUDA unknown error|Unexpected error from cudaGetDeviceCount.*Error (?!34:)\d+: ", re.S)
"""Errors of a GPU that is there but does not start; 34 is the stub of a driver, without any GPU."""
TOO_OLD = r".*NVIDIA driver on your system is too old \(found version (\d+)\)"
"""Matches torch's message about an old driver, and the newest CUDA version that it supports: 12080 is 12.8."""
WIRE_DTYPES = {None: None, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
REDUCE_DTYPES = ("fp32", "wire")


def choose_device(env: ProcessEnv, *, backend: str = "auto") -> torch.device:
    """Choose this rank's GPU if the host has one for it, else the CPU.

    gloo, a Horovod without NCCL, and some environments require the CPU. If a rank sees only one GPU, it uses that GPU,
    because the launcher has bound it; connect() checks it. Over NCCL `bigbatch train` lists each rank's own GPU first.
    Raises: CommError if nccl has no GPU, if a host has GPUs but fewer than ranks, if the driver is too old for this
    torch, or if horovod must sum on GPUs and is not installed.
    """
    if env.keeps_to_cpu or backend == "gloo":
        return torch.device("cpu")
    num_gpus = _count_gpus(env.host)
    if (backend != "nccl" and num_gpus == 0) or (backend == "horovod" and not _horovod_sums_on_gpus()):
        return torch.device("cpu")
    if num_gpus < env.local_size and num_gpus != 1:
        raise too_few_gpus(env.local_size, num_gpus, host=env.host, is_one_host=env.is_one_host)
    device = torch.device("cuda", 0 if num_gpus == 1 or lists_gpu_first(env.local_rank) else env.local_rank)
    torch.cuda.set_device(device)
    return device


def _horovod_sums_on_gpus() -> bool:
    return bool(load("bigbatch.comm.backends.horovod.sums_on_gpus")())


def gpu_uuid(device: torch.device) -> str:
    """Return a GPU's UUID as its driver writes it; "" for the CPU, or for an AMD GPU without one."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    # ROCm names each GPU without a UUID "XX", of which torch writes the bytes
    return "" if not uuid or uuid.startswith("58580000-") else f"GPU-{uuid}"


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index, as its tensors report it: "cuda" becomes the current GPU."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _count_gpus(host: str) -> int:
    """Return the number of GPUs; raise CommError if torch would use the CPU beside GPUs that it cannot start."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TOO_OLD)  # it is reported below
        if torch.cuda.is_available():
            return torch.cuda.device_count()
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        if found := re.search(TOO_OLD, str(error)):
            major, minor = divmod(int(found[1]) // 10, 100)
            raise CommError(
                f"the NVIDIA driver supports CUDA {major}.{minor}, and this torch was built for CUDA "
                f"{torch.version.cuda}: update the driver, install a torch for CUDA {major}.{minor} or earlier "
                f"(docs/install.md; in a checkout: make clean, then make train CUDA={major}), or {ON_CPU}"
            ) from None
        if BROKEN.search(str(error)):
            said = first_line(error).rpartition("? ")[2]
            raise CommError(f"the GPUs of {host} do not start ({said}): see nvidia-smi, or {ON_CPU}") from None
    return 0


def backend_for(device: torch.device, backend: str) -> str:
    """Return the backend, with "auto" resolved for this device: nccl on a GPU, tcp on the CPU."""
    if backend != "auto":
        return backend
    return "nccl" if device.type == "cuda" else "tcp"


def connect(
    *,
    backend: str = "auto",
    algorithm: str = "auto",
    group_size: int | None = None,
    wire_dtype: str | None = None,
    predivide: float = 1.0,
    reduce_dtype: str = "fp32",
    buffers: str = "torch",
    table: SizeTable | None = None,
    interface: str | None = None,
    timeout_seconds: float = 60.0,
    warn_seconds: float | None = None,
    meeting_seconds: float | None = None,
    env: ProcessEnv | None = None,
    device: torch.device | None = None,
    heals: bool = False,
    group: "Group | None" = None,
) -> Communicator:
    """Connect to the other ranks of this job, started by mpirun, srun, torchrun or no launcher. Collective.

    backend: "auto" is NCCL if every rank has a GPU, and tcp otherwise. tcp and mpi sum GPU tensors through pinned host
    memory (a CUDA-aware MPI on the GPU itself); gloo sums only CPU tensors.
    algorithm: one of ALGORITHMS in comm/algorithms/by_name.py; hybrid with its table. "auto" follows the table; without
    a table it is native with NCCL, else hierarchical.
    group_size: splits hosts into smaller node groups.
    wire_dtype: "float16" or "bfloat16" halves the bytes of fp32 tensors between ranks (see Wire for predivide).
    reduce_dtype: "fp32" sums half-precision values in fp32, "wire" rounds partial sums at each hop.
    buffers: "registered" or "symmetric" sums fusion buffers without a copy (see RegisteredMemory).
    interface: the network interface on hosts with several; the launcher's choice takes precedence.
    device: None selects choose_device(). Ranks that share a GPU are refused, except with tcp and mpi on a named device,
    or with NCCL_MULTI_RANK_GPU_ENABLE=1 if each rank sees one GPU.
    heals: if a rank is lost, the remaining ranks can form a new group by regroup(), except with registered or
    symmetric buffers. group: the result of regroup().
    If one sum or the meeting takes warn_seconds (10, or timeout_seconds if that is shorter), the late ranks are logged;
    after timeout_seconds the wait ends in an error. The first meeting waits for meeting_seconds if that is longer.
    Close it by `with connect() as communicator:`, which also ends the other ranks after an exception, or by close().
    Raises: CommError if the ranks cannot meet, or their ranks, hosts or GPUs are inconsistent; TypeError for an
    argument of a wrong type; ValueError for an unknown or impossible choice.
    """
    limits = _limits(timeout_seconds, warn_seconds, meeting_seconds)
    env = group.env if group else env or find_process_env(timeout_seconds=limits["meeting_seconds"])
    if env.world_size > 1 and sys.excepthook is sys.__excepthook__:
        sys.excepthook = show_uncaught
    require_type(algorithm, str, what="algorithm", legal='a name, such as "ring"')
    if table is not None:
        require_type(table, SizeTable, what="table", legal="a table, such as read_tuned(path).table")
    if group_size is not None:
        require_type(group_size, int, what="group_size", legal="a number of ranks, such as 4")
    if env.stopped_file is not None and group is None:  # else the caller records, once it may write
        load("bigbatch.comm.rendezvous.exit_record.record_begin")(env)
    is_stated = device is not None
    backend, device = _choose(env, backend, device)
    _require_possible(backend, device, interface=interface, buffers=buffers)
    wire = make_wire(wire_dtype, predivide, reduce_dtype)
    if env.world_size == 1 and group is None:
        connection = _join_alone(env, group_size=group_size, limits=limits)
    else:
        may_share = may_share_gpus() or (is_stated and backend in ("tcp", "mpi"))  # as the user or the caller decides
        connection = load(SEVERAL_RANKS)(
            env,
            backend,
            device=device,
            gpu="" if may_share else gpu_uuid(device),
            group_size=group_size,
            interface=env.interface or interface,
            heals=heals and buffers == "torch",
            former=group,
            limits=limits,
        )
    try:
        transport = make_transport(connection, device=device, buffers=buffers)
        communicator = make_communicator(transport, algorithm, wire=wire, table=table)
    except PeerLostError:  # the job ends
        raise
    except (ValueError, CommError):
        connection.abandon()
        raise
    close_at_exit(connection)
    may_spin = device.type == "cpu" and env.local_rank == 0 and not is_spinning_stated()
    if may_spin and (line := describe_spinning(torch.get_num_threads())):
        tell(line)
    return communicator


def find_process_env(*, timeout_seconds: float) -> ProcessEnv:
    """Return this process's place: in torch's process group if the script has made one, else in the launcher's job.

    Collective if the group's rank and size differ from the launcher's.
    Raises: CommError as find_place(); LaunchError as read_process_env().
    """
    has_group = dist.is_initialized()
    env = read_process_env(has_group=has_group)
    if has_group and (dist.get_rank(), dist.get_world_size()) != (env.rank, env.world_size):
        env = load("bigbatch.comm.rendezvous.spawned.find_place")(env, timeout_seconds=timeout_seconds)
    return env


def _limits(timeout_seconds: float, warn_seconds: float | None, meeting_seconds: float | None) -> dict[str, Any]:
    """Return the time limits with their defaults. Raises: TypeError; ValueError."""
    stated = {"timeout_seconds": timeout_seconds, "warn_seconds": warn_seconds, "meeting_seconds": meeting_seconds}
    for name, seconds in stated.items():
        if seconds is not None or name == "timeout_seconds":
            require_type(seconds, Real, what=name, legal="a number of seconds, such as 60.0")
            if seconds is not None and seconds >= MAX_SECONDS:
                raise ValueError(f"{name}={seconds:g} must be below {MAX_SECONDS:g}, 31 years")
    warn_seconds = min(WARN_SECONDS, timeout_seconds) if warn_seconds is None else warn_seconds
    if not 0 < warn_seconds <= timeout_seconds:
        raise ValueError(
            f"warn_seconds={warn_seconds:g} must be positive, and at most timeout_seconds={timeout_seconds:g}, "
            "after which the job ends"
        )
    return {**stated, "warn_seconds": warn_seconds, "meeting_seconds": max(timeout_seconds, meeting_seconds or 0.0)}


def _choose(env: ProcessEnv, backend: str, device: torch.device | None) -> tuple[str, torch.device]:
    """Return the backend, and the device with its index.

    Raises: CommError as choose_device(); TypeError; ValueError for an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    device = choose_device(env, backend=backend) if device is None else device
    require_type(device, torch.device, what="device", legal='a device, such as torch.device("cpu")')
    return backend_for(device, backend), with_index(device)


def _require_possible(backend: str, device: torch.device, *, interface: str | None, buffers: str) -> None:
    """Raise ValueError if the backend cannot sum on this device, or does not have a stated setting."""
    is_odd = (backend, device.type) in (("nccl", "cpu"), ("gloo", "cuda"))
    if is_odd or ((backend, device.type) == ("horovod", "cuda") and not _horovod_sums_on_gpus()):
        raise ValueError(
            f"backend {backend!r} does not sum tensors on {device}: use nccl for GPUs, gloo for CPUs, or tcp or mpi "
            "for either; horovod sums on GPUs only if it was built with NCCL"
        )
    if interface is not None and backend in ("mpi", "horovod"):
        raise ValueError(
            f"interface {interface!r} has no effect on backend {backend!r}: its MPI library chooses one; leave "
            "it out and tell the library, for Open MPI by OMPI_MCA_btl_tcp_if_include"
        )
    if buffers not in BUFFERS:
        raise ValueError(f"buffers {buffers!r} is unknown; choose one of {', '.join(BUFFERS)}")
    if backend != "nccl" and buffers != "torch":
        raise ValueError(f"buffers {buffers!r} requires NCCL, but the backend here is {backend}: leave it out")


def make_wire(wire_dtype: str | None, predivide: float = 1.0, reduce_dtype: str = "fp32") -> Wire:
    """Make the precision between ranks. Raises: TypeError; ValueError for an unknown name, or a factor of 0 or less."""
    require_type(predivide, Real, what="predivide", legal="a number, such as 1.0")
    if reduce_dtype not in REDUCE_DTYPES:
        raise ValueError(f"reduce_dtype {reduce_dtype!r} is unknown; choose {' or '.join(REDUCE_DTYPES)}")
    if wire_dtype not in WIRE_DTYPES:
        known = ", ".join(str(name) for name in WIRE_DTYPES if name)
        raise ValueError(f"wire_dtype {wire_dtype!r} is unknown; choose one of {known}, or null for the gradient dtype")
    if not 0 < predivide < float("inf"):
        raise ValueError(f"predivide={predivide} must be positive, such as the number of ranks")
    return Wire(WIRE_DTYPES[wire_dtype], predivide, in_fp32=reduce_dtype == "fp32")


def _join_alone(env: ProcessEnv, *, group_size: int | None, limits: dict[str, Any]) -> Connection:
    backend = SingleBackend(is_alone=env is ALONE)
    control = AloneControl(env, timeout_seconds=limits["timeout_seconds"], warn_seconds=limits["warn_seconds"])
    return Connection(env, control, backend, make_topology([env.host], rank=0, group_size=group_size))
