"""The ranks of a job, connected: transport, topology and the chosen all-reduce."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bigbatch.comm.algorithms import AllReduce, make_allreduce
from bigbatch.comm.backends.base import Backend, CommError, InFlight
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.environ import ProcessEnv, read_process_env
from bigbatch.comm.topology import Topology, make_topology

BACKENDS = ("auto", "nccl", "gloo", "mpi")


@dataclass(frozen=True)
class Communicator:
    """What one rank needs to sum tensors with the others."""

    env: ProcessEnv
    backend: Backend
    topology: Topology
    algorithm: str
    all_reduce_: AllReduce
    device: torch.device
    """Where the tensors to sum must be."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.backend.world_size

    def start(self, tensor_N: Tensor, *, label: str) -> InFlight:
        """Start summing a flat tensor over all ranks, in place. Collective."""
        return self.backend.submit(lambda: self.all_reduce_(tensor_N), label=label)

    def sum_(self, tensor_N: Tensor, *, label: str) -> Tensor:
        """Sum a flat tensor over all ranks, in place, and wait for it. Collective."""
        self.start(tensor_N, label=label).wait()
        return tensor_N

    def agree(self, what: str, text: str) -> None:
        """Make sure that all ranks hold the same text. Collective. Raises: CommError naming the odd rank."""
        texts = self.backend.all_gather_text(text)
        odd = [rank for rank, other in enumerate(texts) if other != texts[0]]
        if odd:
            raise CommError(
                f"rank {odd[0]} and rank 0 disagree on {what}: {first_difference(texts[odd[0]], texts[0])}; "
                "start all ranks from the same files with the same command"
            )

    def close(self) -> None:
        """End communication; after a run that went well. Collective."""
        self.backend.close()
        uses_mpi = self.backend.name == "mpi" or self.env.master is None
        if self.env.launcher in MPI_LAUNCHERS and self.world_size > 1 and uses_mpi:
            from bigbatch.comm.backends.mpi import finalize_mpi

            finalize_mpi()

    def __str__(self) -> str:
        topology = self.topology
        return (
            f"{self.world_size} ranks in {topology.num_nodes} node groups, started by {self.env.launcher}; "
            f"backend {self.backend.name}, all-reduce {self.algorithm}"
        )


MPI_LAUNCHERS = ("openmpi", "mpich")


def first_difference(ours: str, theirs: str) -> str:
    """The first line in which two texts differ, side by side."""
    pairs = zip(ours.splitlines(), theirs.splitlines(), strict=False)
    return next((f"{a.strip()!r} against {b.strip()!r}" for a, b in pairs if a != b), "one is longer")


def choose_device(env: ProcessEnv, *, backend: str = "auto") -> torch.device:
    """This rank's GPU where the host has one for it, else the CPU. gloo and mpi keep to the CPU.

    Raises: CommError for nccl without enough GPUs.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend in ("gloo", "mpi") or (backend == "auto" and num_gpus == 0):
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
    timeout_seconds: float = 60.0,
    env: ProcessEnv | None = None,
    device: torch.device | None = None,
) -> Communicator:
    """Meet the other ranks of this job, whatever started them (mpirun, srun, torchrun, nothing). Collective.

    backend "auto" is NCCL where every rank has a GPU and gloo otherwise; algorithm is one of
    bigbatch.comm.algorithms.ALGORITHMS; group_size cuts hosts into smaller node groups.
    Call close() at the end of a good run: mpirun takes a rank that leaves without it for failed.
    Raises: CommError where the ranks cannot meet; ValueError for an unknown or impossible choice.
    """
    env = env or read_process_env()
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    device = device or choose_device(env, backend=backend)
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if (backend == "nccl") != (device.type == "cuda"):
        raise ValueError(
            f"backend {backend!r} does not sum tensors on {device}: nccl is for GPUs, gloo and mpi for CPUs"
        )
    env, transport = _connect(env, backend, device=device, timeout_seconds=timeout_seconds)
    topology = make_topology(transport.all_gather_text(env.host), rank=env.rank, group_size=group_size)
    all_reduce_ = make_allreduce(algorithm, backend=transport, topology=topology)
    return Communicator(env, transport, topology, algorithm, all_reduce_, device)


def _connect(
    env: ProcessEnv, backend: str, *, device: torch.device, timeout_seconds: float
) -> tuple[ProcessEnv, Backend]:
    if env.world_size == 1:
        return env, SingleBackend()
    if backend == "mpi":
        from bigbatch.comm.backends.mpi import MpiBackend

        return env, MpiBackend(env, timeout_seconds=timeout_seconds)
    from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend

    met = env
    if env.master is None and env.launcher in MPI_LAUNCHERS:
        from bigbatch.comm.backends.mpi import meet_by_mpi

        met = replace(env, master=meet_by_mpi(env))
    return env, TorchDistributedBackend(met, library=backend, device=device, timeout_seconds=timeout_seconds)
