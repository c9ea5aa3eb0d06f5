"""MPI as a transport for host tensors, and as the meeting point of ranks that mpirun started."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bigbatch.comm.backends.base import CommError, Group, InFlight, PeerLostError
from bigbatch.comm.backends.in_flight import ThreadQueue
from bigbatch.comm.environ import ProcessEnv

HALF = (torch.float16, torch.bfloat16)


def import_mpi() -> Any:
    """mpi4py's MPI module, initialized for threads, not finalized at exit.

    Without finalize at exit a rank that fails ends at once and mpirun ends the job; with it the rank would
    wait in MPI_Finalize for peers that wait for it.
    Raises: CommError naming the extra to install.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise CommError("the MPI backend needs mpi4py and an MPI library: pip install 'bigbatch[mpi]'") from error
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommError(
            f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): pip install 'bigbatch[mpi]'"
        ) from error
    return MPI


def mpi_world(env: ProcessEnv) -> Any:
    """MPI's communicator of all ranks.

    Raises: CommError where MPI sees another job than the launcher's, such as ranks that know nothing of each other.
    """
    world = import_mpi().COMM_WORLD
    if (world.rank, world.size) != (env.rank, env.world_size):
        raise CommError(
            f"{env.launcher} started rank {env.rank} of {env.world_size}, but MPI sees rank {world.rank} of "
            f"{world.size}: start the job with the mpirun of the MPI library that mpi4py uses"
        )
    return world


def meet_by_mpi(env: ProcessEnv) -> tuple[str, int]:
    """Address and free port on rank 0's host, the same on all ranks. Collective over MPI's world.

    Raises: CommError where rank 0's host name leads nowhere or only to itself.
    """
    world = mpi_world(env)
    answer: tuple[str, int] | str | None = None
    if world.rank == 0:
        answer = _meeting_point(is_one_host=env.is_one_host)
    answer = world.bcast(answer, root=0)
    if isinstance(answer, str):
        raise CommError(answer)
    assert answer is not None
    return answer


def _meeting_point(*, is_one_host: bool) -> tuple[str, int] | str:
    """Address and port, or what stands in the way: the other ranks must hear of it too."""
    host = socket.gethostname()
    remedy = "mend /etc/hosts, or set MASTER_ADDR and MASTER_PORT for all ranks"
    try:
        address = "127.0.0.1" if is_one_host else socket.gethostbyname(host)
    except OSError as error:
        return f"host name {host} does not resolve ({error}): {remedy}"
    if address.startswith("127.") and not is_one_host:
        return f"host name {host} resolves to {address}, which other nodes cannot reach: {remedy}"
    with socket.socket() as probe:
        probe.bind((address, 0))
        return address, probe.getsockname()[1]


def finalize_mpi() -> None:
    """End MPI where it was started; collective, so only after a run that went well."""
    MPI = import_mpi()
    if not MPI.Is_finalized():
        MPI.Finalize()


class MpiBackend:
    """Blocking MPI collectives on host memory, in place, without copies (fp32, fp64).

    MPI knows no half-precision sum: reductions of fp16 and bf16 are carried in fp32, copies in their own bytes.
    It knows no timeout either: wait() gives up after timeout_seconds, and cannot tell which rank is missing.
    """

    name = "mpi"

    def __init__(self, env: ProcessEnv, *, timeout_seconds: float) -> None:
        self._MPI = import_mpi()
        self._timeout_seconds = timeout_seconds
        communicator = mpi_world(env).Dup()
        self.rank = communicator.rank
        self.world_size = communicator.size
        self.world = Group(tuple(range(self.world_size)), communicator)
        self._queue = ThreadQueue(self._explain, while_waiting=self._give_up)

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Split the world by family, keeping the order within each."""
        color = next(i for i, ranks in enumerate(families) if self.rank in ranks)
        ranks = tuple(families[color])
        return Group(ranks, self.world.handle.Split(color, ranks.index(self.rank)))

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """MPI_Allreduce in place."""
        with _Summable(tensor_N) as buffer:
            group.handle.Allreduce(self._MPI.IN_PLACE, buffer)

    def reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """MPI_Reduce into the first rank of the group."""
        with _Summable(tensor_N) as buffer:
            if group.handle.rank == 0:
                group.handle.Reduce(self._MPI.IN_PLACE, buffer)
            else:
                group.handle.Reduce(buffer, None)

    def broadcast_(self, tensor_N: Tensor, group: Group) -> None:
        """MPI_Bcast of the bytes."""
        group.handle.Bcast(_bytes(tensor_N))

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        """MPI_Reduce_scatter_block."""
        with _Summable(tensor_N) as buffer, _Summable(shard_M) as shard:
            group.handle.Reduce_scatter_block(buffer, shard)

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        """MPI_Allgather of the bytes."""
        group.handle.Allgather(_bytes(shard_M), _bytes(tensor_N))

    def exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> None:
        """MPI_Sendrecv of the bytes."""
        self.world.handle.Sendrecv(_bytes(send), to, recvbuf=_bytes(receive), source=source)

    def all_gather_text(self, text: str) -> list[str]:
        """MPI_Allgather of strings."""
        texts: list[str] = []
        self.submit(
            lambda: texts.extend(self.world.handle.allgather(text)), label="comparison of a text over all ranks"
        ).wait()
        return texts

    def submit(self, operation: Callable[[], None], *, label: str) -> InFlight:
        """Start the operation on a thread, beside backward."""
        return self._queue.submit(operation, label=label)

    def close(self) -> None:
        """Wait for all ranks; the second time, do nothing."""
        if self._queue.is_closed:
            return
        self.submit(self.world.handle.Barrier, label="the last barrier").wait()
        self._queue.close()

    def _give_up(self, label: str, seconds: float) -> None:
        if seconds > self._timeout_seconds:
            raise self._explain(label, seconds, TimeoutError("some rank has not come to it"))

    def _explain(self, label: str, seconds: float, error: Exception) -> CommError:
        return PeerLostError(f"rank {self.rank}: {label} failed after {seconds:.1f} s (mpi: {error})")


class _Summable:
    """A NumPy view of a host tensor that MPI can sum; half precision goes through an fp32 copy."""

    def __init__(self, tensor_N: Tensor) -> None:
        self._tensor_N = tensor_N
        self._carrier_N = tensor_N.float() if tensor_N.dtype in HALF else tensor_N

    def __enter__(self) -> Any:
        return self._carrier_N.numpy()

    def __exit__(self, *_: object) -> None:
        if self._carrier_N is not self._tensor_N:
            self._tensor_N.copy_(self._carrier_N)


def _bytes(tensor_N: Tensor) -> Any:
    return tensor_N.view(torch.uint8).numpy()
