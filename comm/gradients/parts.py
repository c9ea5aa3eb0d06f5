"""The two halves of an all-reduce on their own: for those who work on a part of the sum before they spread it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import Backend
from bigbatch.comm.communicator import Communicator


def scattering(communicator: Communicator) -> Communicator:
    """The same ranks, where start() leaves each of them its own part of the sum and no more.

    By the backend's own reduce-scatter, in the tensors' own precision, whatever algorithm and wire are.
    """
    return _moving(communicator, "reduce-scatter", scatter_sum_)


def gathering(communicator: Communicator) -> Communicator:
    """The same ranks, where start() spreads each rank's own part to all, by the backend's own all-gather."""
    return _moving(communicator, "all-gather", gather_)


def _moving(communicator: Communicator, name: str, move: Callable[..., None]) -> Communicator:
    moving = partial(move, backend=communicator.backend, staging=Staging())
    return replace(communicator, algorithm=name, wire=Wire(), table=None, all_reduce_=moving)


def own_part(buffer_N: Tensor, *, rank: int, world_size: int) -> Tensor:
    """The rank-th of equal parts, as a view. Raises: ValueError where the buffer has none."""
    if buffer_N.numel() % world_size:
        raise ValueError(f"{buffer_N.numel()} elements have no {world_size} equal parts: fill them up to a multiple")
    return buffer_N.view(world_size, -1)[rank]


def scatter_sum_(buffer_N: Tensor, *, backend: Backend, staging: Staging) -> None:
    """Leave this rank's part of the sum over all ranks in its place; the other parts are undefined after.

    Collective. By the transport's own reduce-scatter: each rank sends nbytes * (n - 1) / n.
    """
    part_M = own_part(buffer_N, rank=backend.rank, world_size=backend.world_size)
    shard_M = staging.take("shard", part_M.numel(), buffer_N, buffer_N.dtype)
    backend.reduce_scatter(shard_M, buffer_N, backend.world)
    part_M.copy_(shard_M)


def gather_(buffer_N: Tensor, *, backend: Backend, staging: Staging) -> None:
    """Spread each rank's part to all ranks, in place. Collective. Each rank sends nbytes * (n - 1) / n, or less."""
    part_M = own_part(buffer_N, rank=backend.rank, world_size=backend.world_size)
    shard_M = staging.take("shard", part_M.numel(), buffer_N, buffer_N.dtype)
    backend.all_gather(buffer_N, shard_M.copy_(part_M), backend.world)
