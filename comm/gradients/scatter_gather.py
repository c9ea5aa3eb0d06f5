"""The two halves of an all-reduce, for callers that update their part of the sum before the all-gather."""

import torch
from torch import Tensor

from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.communicator import Communicator


class ScatterGather:
    """Reduce-scatter and all-gather of flat buffers, in place, over the ranks of a communicator.

    A buffer has equal parts, one for each rank, in rank order. Both halves use the backend's own collectives in the
    tensors' precision: the communicator's algorithm and wire_dtype do not apply. Sums of half precision are made in
    fp32 if its wire says so. Buffers from communicator.allocate() travel without copies, except a rank's own part if
    the transport needs a separate tensor (Capabilities.in_place).
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._backend = communicator, communicator.transport.backend

    def own_part(self, buffer_N: Tensor) -> Tensor:
        """Return this rank's part of a buffer, as a view."""
        return buffer_N.view(self._communicator.world_size, -1)[self._communicator.rank]

    def start_reduce_scatter(self, buffer_N: Tensor, *, label: str) -> InFlight:
        """Start to sum a buffer; each rank gets its own part, and the other parts become undefined. Collective.

        Each rank sends nbytes * (n - 1) / n.
        """
        return self._communicator.transport.start(
            self._reduce_scatter_, buffer_N, label=label, algorithm="reduce-scatter", wire=Wire()
        )

    def _reduce_scatter_(self, buffer_N: Tensor) -> None:
        part_M = self.own_part(buffer_N)
        shard_M = part_M if self._backend.capabilities.in_place else torch.empty_like(part_M)
        with self._communicator.wire.widened(shard_M, self._backend) as sum_M:
            self._backend.reduce_scatter(sum_M, buffer_N.to(sum_M.dtype), self._backend.world)
        if shard_M is not part_M:
            part_M.copy_(shard_M)

    def start_all_gather(self, buffer_N: Tensor, *, label: str) -> InFlight:
        """Start to copy each rank's part to all ranks. Collective. Each rank sends at most nbytes * (n - 1) / n."""
        return self._communicator.transport.start(
            self._all_gather_, buffer_N, label=label, algorithm="all-gather", wire=Wire()
        )

    def _all_gather_(self, buffer_N: Tensor) -> None:
        part_M = self.own_part(buffer_N)
        shard_M = part_M if self._backend.capabilities.in_place else part_M.clone()
        self._backend.all_gather(buffer_N, shard_M, self._backend.world)

    def all_gather_(self, buffer_N: Tensor, *, label: str) -> Tensor:
        """Copy each rank's part to all ranks and wait until it is done; return the buffer. Collective."""
        self.start_all_gather(buffer_N, label=label).wait()
        return buffer_N
