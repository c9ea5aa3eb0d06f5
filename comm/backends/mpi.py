"""MPI as a transport for host tensors."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from bigbatch.comm.backends.base import HALF, Capabilities, Group, InFlight
from bigbatch.comm.backends.in_flight import ThreadQueue, behind_kernels
from bigbatch.comm.backends.operation_tags import OperationTags, require_same_operation
from bigbatch.comm.rendezvous.by_mpi import import_mpi, mpi_world, scripts_mpi
from bigbatch.comm.rendezvous.control import OperationFacts
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import CommError

T = TypeVar("T")
HOST = torch.device("cpu")


def on_queue(queue: ThreadQueue, operation: Callable[[], T], *, label: str) -> T:
    """Run a step of the set-up on the queue's thread, under the queue's time limit; return its result."""
    answers: list[T] = []
    queue.submit(lambda: answers.append(operation()), label=label).wait()
    return answers[0]


def finalize_mpi() -> None:
    """End MPI unless the script started it; collective, so only after a run that ended well."""
    MPI = import_mpi()
    if not scripts_mpi() and not MPI.Is_finalized():
        MPI.Finalize()


class MpiBackend:
    """Sums and sends by blocking MPI calls, in place, without copies (fp32, fp64).

    It works on host memory, and with a CUDA-aware MPI also on GPU memory. MPI has no sum of half precision: sums of
    fp16 and bf16 travel in fp32, copies in their own bytes. MPI has no time limit either: wait() gives up after the
    control's. device: where the tensors to sum are.
    """

    name = "mpi"

    def __init__(self, env: ProcessEnv, control: JobControl, *, device: torch.device = HOST, **_: object) -> None:
        self._MPI = import_mpi()
        world = mpi_world(env)
        self.capabilities = Capabilities(("cpu", "cuda") if is_cuda_aware() else ("cpu",))
        self._gpu = device if device.type == "cuda" and "cuda" in self.capabilities.device_types else None
        detector = control.detector
        self._queue = ThreadQueue(detector.make_error_and_stop_requests, while_waiting=detector.raise_if_failed)
        self.oldest = self._queue.oldest
        # a copy of the communicator, so that no message matches one of the script's own MPI calls
        communicator = on_queue(self._queue, world.Dup, label="MPI's copy of its world")
        self.rank = communicator.rank
        self.world_size = communicator.size
        self.world = Group(tuple(range(self.world_size)), communicator)
        # MPI, too, would add up two sums of one size
        self._queue.begin = partial(require_same_operation, self, tags=OperationTags(self.rank))

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Split the world by family, keeping the order within each."""
        color = next(i for i, ranks in enumerate(families) if self.rank in ranks)
        ranks = tuple(families[color])
        place = ranks.index(self.rank)
        handle = on_queue(self._queue, lambda: self.world.handle.Split(color, place), label="MPI's split of its world")
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
        return InFlight(self.world.handle.Isend(_bytes(tensor_N), to).Wait)

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

        return InFlight(wait)

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        return InFlight(self.start_receive(receive, source=source).wait, self.start_send(send, to=to).wait)

    def submit(self, operation: Callable[[], None], **facts: Unpack[OperationFacts]) -> InFlight:
        if self._gpu is not None:
            operation = behind_kernels(operation, self._gpu)
        return self._queue.submit(operation, **facts)

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
    """Return whether MPI accepts pointers to GPU memory; False for a library without MPIX_Query_cuda_support."""
    library = ctypes.CDLL(import_mpi().__file__)
    query = getattr(library, "MPIX_Query_cuda_support", None)
    return bool(query and query())


def _for_mpi(tensor_N: Tensor) -> Any:
    """Return the tensor in a form that MPI can read now; on a GPU, first wait for the current stream's kernels."""
    if not tensor_N.is_cuda:
        return tensor_N.numpy()
    torch.cuda.current_stream(tensor_N.device).synchronize()
    return tensor_N


def _bytes(tensor_N: Tensor) -> Any:
    return _for_mpi(tensor_N.view(torch.uint8))
