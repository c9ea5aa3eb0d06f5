"""The ranks of a job, connected: transport, topology and the chosen all-reduce."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bigbatch.comm.algorithms import ALGORITHMS, AllReduce, make_allreduce
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import Backend, CommError, InFlight, PeerLostError, dtype_name
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.control import Control
from bigbatch.comm.environ import MPI_LAUNCHERS, ProcessEnv, read_process_env
from bigbatch.comm.host_staging import HostStaging
from bigbatch.comm.hybrid import HybridTable
from bigbatch.comm.node_memory import NodeMemory
from bigbatch.comm.places import meet
from bigbatch.comm.stall import StallInspector
from bigbatch.comm.timeline import Timeline, merge
from bigbatch.comm.topology import Topology, make_topology

BACKENDS = ("auto", "nccl", "gloo", "mpi", "tcp", "horovod")
WARN_SECONDS = 10.0
MOST_TRACED_RANKS = 64
"""A trace of more ranks is too long to look at."""
WIRE_DTYPES = {None: None, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


_open: set[Control] = set()
"""The connections that this process has not closed."""


@dataclass(frozen=True)
class Communicator:
    """What one rank needs to sum tensors with the others."""

    env: ProcessEnv
    control: Control
    backend: Backend
    topology: Topology
    memory: NodeMemory | None
    """What ranks of a node share, for transports of host tensors; None for those of GPU tensors."""
    staging: HostStaging | None
    """For GPU tensors over a transport of host tensors."""
    algorithm: str
    all_reduce_: AllReduce
    wire: Wire
    table: HybridTable | None
    device: torch.device
    """Where the tensors to sum must be."""
    timeline: Timeline
    inspector: StallInspector | None = None

    @property
    def rank(self) -> int:
        """This rank."""
        return self.env.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.env.world_size

    @property
    def transport_device(self) -> torch.device:
        """Where the backend itself reads tensors: on the host, where those of a GPU are staged."""
        return self.device if self.staging is None else torch.device("cpu")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """What can run here, but for hybrid, which needs a table."""
        names = tuple(name for name in ALGORITHMS if name != "hybrid")
        return names if self.backend.capabilities.has_messages else ("native",)

    def with_algorithm(
        self, algorithm: str, *, wire: Wire | None = None, table: HybridTable | None = None
    ) -> "Communicator":
        """The same ranks with another all-reduce, or another precision between them. Collective.

        Raises: ValueError for one that cannot run here.
        """
        wire = wire or self.wire
        table = table or self.table
        _require_wire(wire, self.backend)
        if algorithm in ALGORITHMS and algorithm not in (*self.algorithms, "hybrid"):
            raise ValueError(
                f"algorithm {algorithm!r} is made of messages between ranks, which {self.backend.name} has not: "
                f"use {' or '.join(self.algorithms)}, or another backend"
            )
        strange = [name for name in table.algorithms if name not in self.algorithms] if table else []
        if algorithm == "hybrid" and strange:
            raise ValueError(
                f"the table of algorithm 'hybrid' uses {', '.join(strange)}, but {self.backend.name} has "
                f"{', '.join(self.algorithms)} only: make a table here by bigbatch comm tune, or take another backend"
            )
        self.agree("the all-reduce", f"{algorithm}\n{wire}\n{table}\n{self.topology.groups}")
        all_reduce_ = make_allreduce(
            algorithm,
            backend=self.backend,
            topology=self.topology,
            memory=self.memory,
            wire=wire,
            table=table,
        )
        return replace(self, algorithm=algorithm, wire=wire, table=table, all_reduce_=all_reduce_)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros that can be summed without copies. Collective."""
        if self.memory is None or self.staging is not None:
            return torch.zeros(num_elements, dtype=dtype, device=self.device)
        return self.memory.allocate(num_elements, dtype)

    def release(self, tensor_N: Tensor) -> None:
        """Give back what allocate() gave, on all ranks alike; use it no more."""
        if self.memory is not None and self.staging is None:
            self.memory.release(tensor_N)

    def start(self, tensor_N: Tensor, *, label: str) -> InFlight:
        """Start summing a flat tensor over all ranks, in place. Collective.

        A host tensor that is not from allocate() is copied there and back.
        Raises: ValueError for a tensor on another device, not flat, or of a dtype that the backend cannot sum.
        """
        self._require_summable(tensor_N)
        operation = self._sum_of(tensor_N, label=label)
        if self.timeline.is_active:
            operation = self._recorded(operation, tensor_N, label=label)
        return self.backend.submit(operation, label=label)

    def _recorded(self, operation: Callable[[], None], tensor_N: Tensor, *, label: str) -> Callable[[], None]:
        self.timeline.mark(label, row="buffers ready")
        wire = dtype_name(self.wire.of(tensor_N))
        on_host = self.staging is not None or self.backend.name == "mpi"  # both are done when their thread is

        def recorded() -> None:
            facts = {"algorithm": self.algorithm_for(tensor_N), "bytes": tensor_N.nbytes, "wire": wire}
            with self.timeline.span(label, row="all-reduce", on_host=on_host, **facts):
                operation()

        return recorded

    def algorithm_for(self, tensor_N: Tensor) -> str:
        """Which algorithm sums this tensor: hybrid's choice, else the one and only."""
        return self.table.choose(tensor_N.nbytes) if self.table and self.algorithm == "hybrid" else self.algorithm

    def _require_summable(self, tensor_N: Tensor) -> None:
        if tensor_N.device != self.device:
            raise ValueError(f"a tensor on {tensor_N.device} cannot be summed: ranks communicate on {self.device}")
        if tensor_N.dtype not in self.backend.capabilities.dtypes:
            names = ", ".join(map(dtype_name, self.backend.capabilities.dtypes))
            raise ValueError(f"{self.backend.name} cannot sum {tensor_N.dtype}; it sums {names}")
        if tensor_N.dim() != 1 or not tensor_N.is_contiguous():
            raise ValueError(f"only a flat, contiguous tensor can be summed, not one of shape {tuple(tensor_N.shape)}")

    def _sum_of(self, tensor_N: Tensor, *, label: str) -> Callable[[], None]:
        if not tensor_N.numel():
            return lambda: None
        if self.memory is None or self.memory.holds(tensor_N):
            return lambda: self.all_reduce_(tensor_N)
        scratch_N = self.memory.scratch(tensor_N.numel(), tensor_N.dtype, what=label)
        if self.staging is not None:
            return self._by_way_of_host(tensor_N, scratch_N, self.staging)

        def by_way_of_scratch() -> None:
            scratch_N.copy_(tensor_N)
            self.all_reduce_(scratch_N)
            tensor_N.copy_(scratch_N)

        return by_way_of_scratch

    def _by_way_of_host(self, tensor_N: Tensor, scratch_N: Tensor, staging: HostStaging) -> Callable[[], None]:
        staging.pin(scratch_N)
        ready = torch.cuda.Event()
        ready.record()

        def by_way_of_host() -> None:
            staging.fetch(scratch_N, tensor_N, ready=ready)
            self.all_reduce_(scratch_N)
            staging.bring_back(tensor_N, scratch_N)

        return by_way_of_host

    def sum_(self, tensor_N: Tensor, *, label: str) -> Tensor:
        """Sum a flat tensor over all ranks, in place, and wait for it. Collective."""
        self.start(tensor_N, label=label).wait()
        return tensor_N

    def gather_text(self, text: str) -> list[str]:
        """A short text of every rank, in rank order. Collective."""
        return self.control.gather_text(text)

    def agree(self, what: str, text: str) -> None:
        """Make sure that all ranks hold the same text. Collective. Raises: CommError naming the odd rank."""
        digests = self.gather_text(hashlib.sha256(text.encode()).hexdigest())
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            texts = self.gather_text(text if self.rank in (0, odd[0]) else "")
            raise CommError(
                f"rank {odd[0]} and rank 0 disagree on {what}: {first_difference(texts[odd[0]], texts[0])}; "
                "start all ranks from the same files with the same command"
            )

    def gather_trace(self) -> str:
        """What the timelines of the first ranks recorded since the last time, as one trace, on rank 0. Collective."""
        mine = self.timeline.take(rank=self.rank, host=self.env.host)
        texts = self.control.collect_text(mine if self.rank < MOST_TRACED_RANKS else "", what="collection of traces")
        return merge(texts)

    def close(self) -> None:
        """End communication; after a run that went well. Collective. MPI ends with the last connection."""
        if self.inspector is not None:
            self.inspector.close()
        self.backend.close()
        uses_mpi = self.backend.name in ("mpi", "horovod") or self.env.master is None
        _open.discard(self.control)
        if self.env.launcher in MPI_LAUNCHERS and self.world_size > 1 and uses_mpi and not _open:
            from bigbatch.comm.backends.mpi import finalize_mpi

            finalize_mpi()

    def __str__(self) -> str:
        topology = self.topology
        return (
            f"{self.world_size} ranks in {topology.num_nodes} node groups, started by {self.env.launcher}; "
            f"backend {self.backend.name}, all-reduce {self.algorithm}"
        )


def first_difference(ours: str, theirs: str) -> str:
    """The first line in which two texts differ, side by side."""
    pairs = zip(ours.splitlines(), theirs.splitlines(), strict=False)
    return next((f"{a.strip()!r} against {b.strip()!r}" for a, b in pairs if a != b), "one is longer")


def choose_device(env: ProcessEnv, *, backend: str = "auto") -> torch.device:
    """This rank's GPU where the host has one for it, else the CPU. gloo and horovod keep to the CPU.

    Raises: CommError for nccl without a GPU, and where a host has some, but fewer than ranks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend in ("gloo", "horovod") or (backend != "nccl" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus < env.local_size:
        raise CommError(
            f"{env.local_size} ranks on {env.host} but {num_gpus} GPUs: start one rank per GPU, let each see all "
            "GPUs of its host (in Slurm --gpus-per-node, not --gpus-per-task), or set comm.backend to gloo to train "
            "on the CPU"
        )
    device = torch.device("cuda", env.local_rank)
    torch.cuda.set_device(device)
    return device


def connect(
    *,
    backend: str = "auto",
    algorithm: str = "native",
    group_size: int | None = None,
    wire_dtype: str | None = None,
    predivide: float = 1.0,
    table: HybridTable | None = None,
    interface: str | None = None,
    timeout_seconds: float = 60.0,
    warn_seconds: float | None = None,
    env: ProcessEnv | None = None,
    device: torch.device | None = None,
) -> Communicator:
    """Meet the other ranks of this job, whatever started them (mpirun, srun, torchrun, nothing). Collective.

    backend "auto" is NCCL where every rank has a GPU and tcp otherwise; tcp and mpi sum the tensors of GPUs by way of
    pinned host memory (a CUDA-aware MPI on the GPU itself), gloo keeps to CPUs; algorithm is one of
    bigbatch.comm.algorithms.ALGORITHMS, hybrid with its table; group_size cuts hosts into smaller node groups;
    wire_dtype "float16" or "bfloat16" halves the bytes of fp32 tensors between ranks (see Wire for predivide);
    interface names the network interface of hosts that have several. After warn_seconds (10, or timeout_seconds where
    that is shorter) in one sum late ranks are named; after timeout_seconds the wait ends in an error.
    Call close() at the end of a good run: mpirun takes a rank that leaves without it for failed.
    Raises: CommError where the ranks cannot meet, or contradict each other about who they are and where; ValueError
    for an unknown or impossible choice.
    """
    env = env or read_process_env()
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    wire = make_wire(wire_dtype, predivide)
    warn_seconds = _checked_warning(warn_seconds, timeout_seconds=timeout_seconds)
    _require_own_interface(backend, interface)
    device = device or choose_device(env, backend=backend)
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "tcp"
    _require_device(backend, device)
    control = Control(env, timeout_seconds=timeout_seconds, interface=interface)
    control.library = backend
    nodes = [place.node for place in meet(env, control)]
    topology = make_topology(nodes, rank=env.rank, group_size=group_size)
    transport = _connect(env, control, backend, device=device, interface=interface)
    _open.add(control)
    is_native = device.type in transport.capabilities.device_types
    is_of_host = not is_native or device.type == "cpu"
    memory = NodeMemory(topology, control) if is_of_host and transport.capabilities.has_messages else None
    inspector = (
        StallInspector(control, transport.oldest, warn_seconds=warn_seconds, ends_job=backend == "nccl")
        if env.world_size > 1
        else None
    )
    met = Communicator(
        env=env,
        control=control,
        backend=transport,
        topology=topology,
        memory=memory,
        staging=None if is_native else HostStaging(device),
        algorithm="",
        all_reduce_=lambda tensor_N: None,
        wire=wire,
        table=table,
        device=device,
        timeline=Timeline(device),
        inspector=inspector,
    )
    try:
        return met.with_algorithm(algorithm, table=table)
    except PeerLostError:  # the job ends
        raise
    except (ValueError, CommError):
        _abandon(met)
        raise


def _checked_warning(warn_seconds: float | None, *, timeout_seconds: float) -> float:
    warn_seconds = min(WARN_SECONDS, timeout_seconds) if warn_seconds is None else warn_seconds
    if not 0 < warn_seconds <= timeout_seconds:
        raise ValueError(
            f"warn_seconds={warn_seconds:g} must be positive, and at most timeout_seconds={timeout_seconds:g}, after "
            "which there is nobody left to warn"
        )
    return warn_seconds


def _require_own_interface(backend: str, interface: str | None) -> None:
    if interface is not None and backend in ("mpi", "horovod"):
        raise ValueError(
            f"interface {interface!r} has no effect on backend {backend!r}, whose MPI library chooses its own: leave "
            "it out and tell the library, as by OMPI_MCA_btl_tcp_if_include for Open MPI"
        )


def _require_device(backend: str, device: torch.device) -> None:
    if (backend, device.type) in (("nccl", "cpu"), ("gloo", "cuda"), ("horovod", "cuda")):
        raise ValueError(
            f"backend {backend!r} does not sum tensors on {device}: nccl is for GPUs, gloo and horovod for CPUs, "
            "tcp and mpi for both"
        )


def _abandon(met: Communicator) -> None:
    """Leave nothing behind of a connection that was refused, on all ranks alike."""
    _open.discard(met.control)
    if met.inspector is not None:
        met.inspector.close()
    met.backend.abandon()


def _require_wire(wire: Wire, transport: Backend) -> None:
    if wire.dtype is not None and wire.dtype not in transport.capabilities.dtypes:
        raise ValueError(
            f"{transport.name} cannot sum {dtype_name(wire.dtype)}: choose another wire_dtype, or another backend"
        )


def make_wire(wire_dtype: str | None, predivide: float = 1.0) -> Wire:
    """The precision between ranks by name. Raises: ValueError for an unknown name, or a factor that is not positive."""
    if wire_dtype not in WIRE_DTYPES:
        known = ", ".join(str(name) for name in WIRE_DTYPES if name)
        raise ValueError(f"wire_dtype {wire_dtype!r} is unknown; choose one of {known}, or null for the gradients' own")
    if not 0 < predivide < float("inf"):
        raise ValueError(f"predivide={predivide} must be positive, such as the number of ranks")
    return Wire(WIRE_DTYPES[wire_dtype], predivide)


def _connect(
    env: ProcessEnv, control: Control, backend: str, *, device: torch.device, interface: str | None
) -> Backend:
    if env.world_size == 1:
        return SingleBackend()
    if backend == "tcp":
        from bigbatch.comm.backends.tcp import TcpBackend

        return TcpBackend(env, control, interface=interface)
    if backend == "mpi":
        from bigbatch.comm.backends.mpi import MpiBackend

        return MpiBackend(env, control, device=device)
    if backend == "horovod":
        from bigbatch.comm.backends.horovod import HorovodBackend

        return HorovodBackend(env, control, device=device)
    from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend

    return TorchDistributedBackend(env, control, library=backend, device=device, interface=interface)
