"""MPI as a transport for host tensors, and as the meeting point of ranks that mpirun started."""

import ctypes
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from bigbatch.comm.backends.base import HALF, AllOf, Capabilities, Group, InFlight, Started
from bigbatch.comm.backends.in_flight import ThreadQueue, behind_kernels
from bigbatch.comm.rendezvous.addresses import own_address
from bigbatch.comm.rendezvous.bounded_store import answer_within
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.secret import new_secret
from bigbatch.errors import CommError, first_line

T = TypeVar("T")
HOST = torch.device("cpu")


def import_mpi() -> Any:
    """Import mpi4py's MPI module, initialized for threads, not finalized at exit.

    Without finalize at exit a rank that fails ends at once and mpirun ends the job; with it the rank would wait in
    MPI_Finalize for peers that wait for it.
    Raises: CommError naming the extra to install.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise CommError("the MPI backend needs mpi4py and an MPI library: pip install 'bigbatch[mpi]'") from error
    # before the import of MPI, which reads it
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommError(
            f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): pip install 'bigbatch[mpi]'"
        ) from error
    return MPI


def mpi_world(env: ProcessEnv) -> Any:
    """Return MPI's communicator of all ranks.

    Raises: CommError if MPI's job differs from the launcher's, as with ranks that do not know of each other.
    """
    world = import_mpi().COMM_WORLD
    if (world.rank, world.size) != (env.rank, env.world_size):
        raise CommError(
            f"{env.launcher} started rank {env.rank} of {env.world_size}, but MPI sees rank {world.rank} of "
            f"{world.size}: start the job with the mpirun of the MPI library that mpi4py uses"
        )
    return world


def meet_by_mpi(env: ProcessEnv, *, timeout_seconds: float, interface: str | None = None) -> tuple[str, int, str]:
    """Agree on an address and free port of rank 0's host and a new secret. Collective over MPI's world.

    Raises: CommError if rank 0's host name does not resolve or only to its loopback, and after timeout_seconds without
    the other ranks.
    """
    world = mpi_world(env)
    answer: tuple[str, int, str] | str | None = None
    if world.rank == 0:
        answer = _meeting_point(is_one_host=env.is_one_host, interface=interface)
    try:
        answer = answer_within(timeout_seconds, lambda: world.bcast(answer, root=0))
    except Exception as error:  # before there is a control channel that could explain it
        raise CommError(
            f"rank {env.rank}: meeting by MPI failed ({first_line(error)}): see that all ranks started"
        ) from error
    if isinstance(answer, str):
        raise CommError(answer)
    assert answer is not None
    return answer


def _meeting_point(*, is_one_host: bool, interface: str | None) -> tuple[str, int, str] | str:
    """Return an address, a port and a secret, or the error, which the other ranks must hear of too."""
    try:
        address = own_address(is_one_host=is_one_host, interface=interface)
    except CommError as error:
        return str(error)
    with socket.socket() as probe:
        # free now, and closed again: rank 0 opens the rendezvous there right after
        probe.bind((address, 0))
        return address, probe.getsockname()[1], new_secret()


def answer_of(queue: ThreadQueue, operation: Callable[[], T], *, label: str) -> T:
    """Run a step of the set-up on the queue's thread, so that the queue's time limit holds for it."""
    answers: list[T] = []
    queue.submit(lambda: answers.append(operation()), label=label).wait()
    return answers[0]


def mpi_library() -> str:
    """Return the name and version that the MPI library reports."""
    return first_line(import_mpi().Get_library_version())


def finalize_mpi() -> None:
    """End MPI if it was started; collective, so only after a run that ended well."""
    MPI = import_mpi()
    if not MPI.Is_finalized():
        MPI.Finalize()


class MpiBackend:
    """Sums and sends by blocking MPI calls, in place, without copies (fp32, fp64).

    On host memory; a CUDA-aware MPI reads and writes that of GPUs, too. There is no half-precision sum in MPI:
    reductions of fp16 and bf16 are carried in fp32, copies in their own bytes. It knows no timeout either: wait()
    gives up after the control's. device is where the tensors to sum are.
    """

    name = "mpi"

    def __init__(self, env: ProcessEnv, control: Control, *, device: torch.device = HOST) -> None:
        self._MPI = import_mpi()
        world = mpi_world(env)
        self.capabilities = Capabilities(("cpu", "cuda") if is_cuda_aware() else ("cpu",))
        self._gpu = device if device.type == "cuda" and "cuda" in self.capabilities.device_types else None
        self._queue = ThreadQueue(control.explain, while_waiting=control.give_up)
        self.oldest = self._queue.oldest
        # a copy, so that our messages cannot match those of the script's own MPI calls
        communicator = answer_of(self._queue, world.Dup, label="MPI's copy of its world")
        self.rank = communicator.rank
        self.world_size = communicator.size
        self.world = Group(tuple(range(self.world_size)), communicator)

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Split the world by family, keeping the order within each."""
        color = next(i for i, ranks in enumerate(families) if self.rank in ranks)
        ranks = tuple(families[color])
        place = ranks.index(self.rank)
        handle = answer_of(self._queue, lambda: self.world.handle.Split(color, place), label="MPI's split of its world")
        return Group(ranks, handle)

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        with _summable(tensor_N) as buffer:
            group.handle.Allreduce(self._MPI.IN_PLACE, buffer)

    def reduce_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        place = group.ranks.index(root)
        with _summable(tensor_N) as buffer:
            if group.handle.rank == place:
                group.handle.Reduce(self._MPI.IN_PLACE, buffer, root=place)
            else:
                group.handle.Reduce(buffer, None, root=place)

    def broadcast_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        group.handle.Bcast(_bytes(tensor_N), root=group.ranks.index(root))

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        with _summable(tensor_N) as buffer, _summable(shard_M) as shard:
            group.handle.Reduce_scatter_block(buffer, shard)

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        group.handle.Allgather(_bytes(shard_M), _bytes(tensor_N))

    def start_send(self, tensor_N: Tensor, *, to: int) -> InFlight:
        return Started(self.world.handle.Isend(_bytes(tensor_N), to).Wait)

    def start_receive(self, tensor_N: Tensor, *, source: int) -> InFlight:
        data, num_bytes = _bytes(tensor_N), tensor_N.nbytes
        request = self.world.handle.Irecv(data, source)

        def wait() -> None:
            status = self._MPI.Status()
            request.Wait(status)
            count = status.Get_count(self._MPI.BYTE)
            if count != num_bytes:  # MPI accepts a shorter one without an error
                raise CommError(
                    f"rank {source} sent a message of {count} bytes where {num_bytes} were expected: all ranks must "
                    "sum the same tensors in the same order"
                )

        return Started(wait)

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        return AllOf((self.start_receive(receive, source=source), self.start_send(send, to=to)))

    def submit(self, operation: Callable[[], None], *, label: str, ranks: tuple[int, ...] | None = None) -> InFlight:
        if self._gpu is not None:
            operation = behind_kernels(operation, self._gpu)
        return self._queue.submit(operation, label=label, ranks=ranks)

    def close(self) -> None:
        if self._queue.is_closed:
            return
        self.submit(self.world.handle.Barrier, label="the last barrier").wait()
        self._queue.close()

    def abandon(self) -> None:
        """Stop the thread; MPI keeps its memory until it ends."""
        self._queue.close()


@contextmanager
def _summable(tensor_N: Tensor) -> Iterator[Any]:
    """Yield the tensor in a form that MPI can sum; half precision uses an fp32 copy."""
    carrier_N = tensor_N.float() if tensor_N.dtype in HALF else tensor_N
    yield _for_mpi(carrier_N)
    if carrier_N is not tensor_N:
        tensor_N.copy_(carrier_N)


def is_cuda_aware() -> bool:
    """Tell whether MPI takes pointers to GPU memory (Open MPI and MPICH answer this; others count as not aware)."""
    library = ctypes.CDLL(import_mpi().__file__)
    query = getattr(library, "MPIX_Query_cuda_support", None)
    return bool(query and query())


def _for_mpi(tensor_N: Tensor) -> Any:
    """Return a form that MPI can read now: on a GPU, after the kernels that use the tensor."""
    if not tensor_N.is_cuda:
        return tensor_N.numpy()
    torch.cuda.current_stream(tensor_N.device).synchronize()
    return tensor_N


def _bytes(tensor_N: Tensor) -> Any:
    return _for_mpi(tensor_N.view(torch.uint8))
