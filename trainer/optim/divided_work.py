"""Divide work on replicated whole tensors over the ranks: equal bits on all, by one all-gather."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.scatter_gather import ScatterGather
from bigbatch.trainer.optim.matrices import Finish, Work

MAX_PADDING = 2
"""Limit of gathered elements per element of the tensors: at 2, a gather sends as many bytes as an all-reduce."""


@dataclass(frozen=True)
class Shares:
    """Rank of each tensor, and place of its result in a buffer of equal parts."""

    owners: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offset from the start of the owner's part."""
    part: int
    """Elements of each rank's part: as many as the largest one needs."""


def share_out(costs: Sequence[float], num_elements: Sequence[int], *, world_size: int) -> Shares:
    """Assign each tensor, the most expensive first, to the rank with the least work: the same on every rank.

    At worst a rank takes 4/3 of the optimal time (Graham 1969), or as long as the most expensive tensor.
    """
    loads, fills = [0.0] * world_size, [0] * world_size
    owners, offsets = [0] * len(costs), [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(world_size), key=lambda rank: (loads[rank], rank))
        owners[index], offsets[index] = owner, fills[owner]
        loads[owner] += costs[index]
        fills[owner] += num_elements[index]
    return Shares(tuple(owners), tuple(offsets), max(fills))


def gathered_elements(shares: Shares, num_elements: Sequence[int], *, world_size: int) -> int:
    """Return the elements in a gather; 0 if each rank does all work instead (one rank, or too much padding)."""
    gathered = shares.part * world_size
    return 0 if world_size == 1 or gathered > MAX_PADDING * sum(num_elements) else gathered


class DividedWork:
    """A Division by which each rank does the work on some of the tensors; one all-gather collects all results.

    All ranks hold the same bits of the result. If more than half of the gather would be padding, as with more ranks
    than large tensors, each rank does all work instead. one_by_one: work on each tensor separately, so that its bits do
    not depend on which other tensors its rank has.
    """

    def __init__(self, communicator: Communicator, *, one_by_one: bool = False) -> None:
        self._communicator = communicator
        self._scatter_gather = ScatterGather(communicator)
        self._one_by_one = one_by_one
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, tensors: list[Tensor], work: Work, *, costs: list[float], dtype: torch.dtype) -> Finish:
        """Do this rank's part and start the gather; the returned function waits for it, or raises PeerLostError."""
        world_size, rank = self._communicator.world_size, self._communicator.rank
        num_elements = [t.numel() for t in tensors]
        shares = share_out(costs, num_elements, world_size=world_size)
        gathered = gathered_elements(shares, num_elements, world_size=world_size)
        if not gathered:
            results = self._do(work, tensors)
            return lambda: results
        buffer_N = self._buffers.get((gathered, dtype))
        if buffer_N is None:
            buffer_N = self._buffers[gathered, dtype] = self._communicator.allocate(gathered, dtype)
        views = [
            buffer_N[owner * shares.part + offset :][: tensor.numel()].as_strided(tensor.shape, tensor.stride())
            for tensor, owner, offset in zip(tensors, shares.owners, shares.offsets, strict=True)
        ]
        mine = [index for index, owner in enumerate(shares.owners) if owner == rank]
        if mine:
            torch._foreach_copy_([views[i] for i in mine], self._do(work, [tensors[i] for i in mine]))
        gather = self._scatter_gather.start_all_gather(buffer_N, label="all-gather of updates")

        def finish() -> list[Tensor]:
            gather.wait()
            return views

        return finish

    def _do(self, work: Work, tensors: list[Tensor]) -> list[Tensor]:
        return [work([tensor])[0] for tensor in tensors] if self._one_by_one else work(tensors)
