"""Sums of a reducer's fusion buffers over ranks and microbatches on a fixed-point grid."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.grid import Grid
from bigbatch.comm.gradients.scatter_gather import ScatterGather

PART_ALIGN = 64
"""Elements. A CPU kernel works on two or four vectors of at most 64 bytes at a time, and on the rest of a part element
by element, which may round differently (as in torch's fused SGD and Adam)."""


class GridSums:
    """Sums each fusion buffer on a fixed-point grid (see Grid), in int64; counts numbers out of its range.

    Sums have the same bits in any order, for any algorithm, fusion plan and number of ranks and microbatches, if
    fold_() follows each microbatch but the last: then only the grid adds gradients of two microbatches. The grid's
    num_terms includes the terms of all ranks. The count is the last element of a sum, and travels with it. With scatter
    a rank gets only its own part of each sum, so the counts travel separately, once a step; tensors and parts then
    begin at multiples of PART_ALIGN elements.
    """

    element_bytes = torch.int64.itemsize

    def __init__(self, grid: Grid, communicator: Communicator, *, scatter: bool) -> None:
        self._grid, self._communicator, self._transport = grid, communicator, communicator.transport
        self.align = PART_ALIGN if scatter else 1
        self._halves = ScatterGather(communicator) if scatter else None
        # not on a GPU, where the stream orders the reads; not with scatter: a part is read after the counts have come
        self._reads_on_arrival = communicator.device.type == "cpu" and not scatter
        self._sums: list[Tensor] = []
        self._beyond: list[Tensor] = []
        """One element per buffer."""
        self._counts_B, self._num_beyond_1, self._underflow_2 = (
            torch.zeros(count, dtype=torch.int64, device=communicator.device) for count in (0, 1, 2)
        )
        self.own_counts: list[Tensor] | None = None
        """This rank's count in each buffer, before its sum, since the caller set an empty list; None: not recorded."""
        self.counts_underflow = False
        """Whether numbers that the grid rounds to 0 are counted, which costs two more passes over each gradient."""

    def lay_out(self, sizes: Sequence[int]) -> None:
        """Allocate sums for buffers of these sizes, and release the existing ones. Collective."""
        self.release()
        if self._halves:
            self._sums = self._transport.allocate(*((size, torch.int64) for size in sizes))
            [self._counts_B] = self._transport.allocate((len(sizes), torch.int64))
            self._beyond = list(self._counts_B.split(1))
        else:
            self._sums = self._transport.allocate(*((size + 1, torch.int64) for size in sizes))
            self._beyond = [sums_N[-1:] for sums_N in self._sums]

    def release(self) -> None:
        """Free the sums. Collective."""
        for sums_N in (*self._sums, *([self._counts_B] if self._sums and self._halves else [])):
            self._transport.release(sums_N)
        self._sums = self._beyond = []

    def fold_(self, buffers: Sequence[Tensor]) -> None:
        """Add a microbatch's gradients to the sums, and set the gradients to zero."""
        for index, buffer_N in enumerate(buffers):
            self._add_(index, buffer_N)
            buffer_N.zero_()

    @torch.no_grad()
    def _add_(self, index: int, buffer_N: Tensor) -> None:
        counts_2 = self._underflow_2 if self.counts_underflow else None
        self._grid.add_(self._numbers(index), buffer_N, beyond_1=self._beyond[index], counts_2=counts_2)

    def start(self, index: int, buffer_N: Tensor, *, label: str) -> InFlight:
        """Add the last microbatch's gradients, and start to sum over ranks. Collective.

        On a CPU without scatter, a sum is written into its buffer on arrival, while backward continues.
        """
        self._add_(index, buffer_N)
        if self.own_counts is not None:
            self.own_counts.append(self._beyond[index].clone())
        communicator, sums_N = self._communicator, self._sums[index]
        if self._halves:
            return self._halves.start_reduce_scatter(sums_N, label=label)
        if not self._reads_on_arrival:
            return communicator.start(sums_N, label=label)

        def sum_and_read_(total_N: Tensor) -> None:
            communicator.all_reduce_(total_N)
            self._read_(buffer_N, total_N[:-1], total_N[-1:])

        return self._transport.start(
            sum_and_read_, sums_N, label=label, algorithm=communicator.algorithm_for(sums_N), wire=communicator.wire
        )

    @torch.no_grad()
    def _read_(self, buffer_N: Tensor, sums_N: Tensor, beyond_1: Tensor) -> None:
        self._grid.read_(buffer_N, sums_N, beyond_1=beyond_1)
        self._num_beyond_1 += beyond_1
        sums_N.zero_()
        beyond_1.zero_()

    def _numbers(self, index: int) -> Tensor:
        return self._sums[index] if self._halves else self._sums[index][:-1]

    def start_counts(self) -> InFlight | None:
        """Start to sum over ranks the counts that do not travel with the sums, if any. Collective."""
        if not self._halves:
            return None
        return self._communicator.start(self._counts_B, label="all-reduce of counts of numbers out of range")

    def read_(self, buffers: Sequence[Tensor]) -> None:
        """Write all sums not yet read into the buffers (with scatter, only this rank's parts), and zero the sums."""
        if self._reads_on_arrival:
            return
        for index, buffer_N in enumerate(buffers):
            sums_N = self._numbers(index)
            if self._halves:
                buffer_N, sums_N = map(self._halves.own_part, (buffer_N, sums_N))
            self._read_(buffer_N, sums_N, self._beyond[index])
        self.zero_()

    def zero_(self) -> None:
        for sums_N in self._sums:
            sums_N.zero_()
        self._counts_B.zero_()

    @property
    def largest(self) -> float:
        """Largest number of a microbatch that the grid holds."""
        return self._grid.largest

    def take_beyond(self) -> int:
        """Return the count of numbers out of range since the last call, over all ranks. Waits for the device."""
        count = int(self._num_beyond_1)
        self._num_beyond_1.zero_()
        return count

    def take_underflow(self) -> tuple[int, int]:
        """Return this rank's counts since the last call: numbers rounded to 0 by the grid, and numbers not 0. Waits."""
        num_lost, num_nonzero = self._underflow_2.tolist()
        self._underflow_2.zero_()
        return num_lost, num_nonzero
