"""The two halves of an all-reduce: for callers that work on a part of the sum before they spread it."""

from functools import partial

from torch import Tensor

from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import Backend, InFlight
from bigbatch.comm.communicator import Communicator


class ScatterGather:
    """Reduce-scatter and all-gather of flat buffers, in place, over the ranks of a communicator.

    Each rank has the rank-th of equal parts of a buffer. Both use the backend's own collectives, in the tensors' own
    precision, whatever algorithm and wire_dtype the communicator has; sums of half precision are made in fp32 if its
    wire says so. Buffers from communicator.allocate() travel without copies, except a rank's own part if the transport
    needs a separate one (Capabilities.in_place).
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._reduce_scatter_ = partial(
            reduce_scatter_, backend=communicator.backend, staging=Staging(), wire=communicator.wire
        )
        self._all_gather_ = partial(all_gather_, backend=communicator.backend, staging=Staging())

    def own_part(self, buffer_N: Tensor) -> Tensor:
        """Return this rank's part of a buffer, as a view. Raises: ValueError if it has no equal parts."""
        return own_part(buffer_N, rank=self._communicator.rank, world_size=self._communicator.world_size)

    def start_reduce_scatter(self, buffer_N: Tensor, *, label: str) -> InFlight:
        """Start to sum, leaving each rank its part of the sum; the other parts are undefined afterwards. Collective."""
        return self._communicator.start_by(
            self._reduce_scatter_, buffer_N, label=label, algorithm="reduce-scatter", wire=Wire()
        )

    def start_all_gather(self, buffer_N: Tensor, *, label: str) -> InFlight:
        """Start to copy each rank's part to all. Collective."""
        return self._communicator.start_by(
            self._all_gather_, buffer_N, label=label, algorithm="all-gather", wire=Wire()
        )

    def all_gather_(self, buffer_N: Tensor, *, label: str) -> Tensor:
        """Copy each rank's part to all, and wait for it. Collective."""
        self.start_all_gather(buffer_N, label=label).wait()
        return buffer_N


def own_part(buffer_N: Tensor, *, rank: int, world_size: int) -> Tensor:
    """Return the rank-th of equal parts, (N / world_size), as a view. Raises: ValueError if the buffer has none."""
    if buffer_N.numel() % world_size:
        raise ValueError(f"{buffer_N.numel()} elements have no {world_size} equal parts: fill them up to a multiple")
    return buffer_N.view(world_size, -1)[rank]


def reduce_scatter_(buffer_N: Tensor, *, backend: Backend, staging: Staging, wire: Wire) -> None:
    """Leave this rank's part of the sum over all ranks in its place; the other parts are undefined afterwards.

    Collective. By the transport's own reduce-scatter: each rank sends nbytes * (n - 1) / n.
    """
    part_M = own_part(buffer_N, rank=backend.rank, world_size=backend.world_size)
    is_apart = not backend.capabilities.in_place
    shard_M = staging.take("shard", part_M.numel(), buffer_N, buffer_N.dtype) if is_apart else part_M
    with wire.widened(shard_M, backend) as sum_M:
        backend.reduce_scatter(sum_M, buffer_N.to(sum_M.dtype), backend.world)
    if is_apart:
        part_M.copy_(shard_M)


def all_gather_(buffer_N: Tensor, *, backend: Backend, staging: Staging) -> None:
    """Copy each rank's part to all ranks, in place. Collective. Each rank sends nbytes * (n - 1) / n, or less."""
    part_M = own_part(buffer_N, rank=backend.rank, world_size=backend.world_size)
    if backend.capabilities.in_place:
        backend.all_gather(buffer_N, part_M, backend.world)
        return
    shard_M = staging.take("shard", part_M.numel(), buffer_N, buffer_N.dtype)
    backend.all_gather(buffer_N, shard_M.copy_(part_M), backend.world)
