"""Numbers besides the gradients that all ranks sum in every step."""

import torch
from torch import Tensor

from bigbatch.comm.gradients.grid import Grid

NUM_FLAGS = 1
"""Elements behind the running statistics: whether this rank's input failed."""


class StepStatistics:
    """Holds batch norm's running statistics, and whether a rank's input failed: one flat fp32 tensor, one all-reduce.

    The flag rides along because the statistics are summed in every step anyway (docs/decisions/020).
    """

    def __init__(self, flat_N: Tensor) -> None:
        self.flat_N = flat_N
        """The running statistics of all norms, and NUM_FLAGS elements behind them."""

    @property
    def running_N(self) -> Tensor:
        """Show the running statistics alone, as a view."""
        return self.flat_N[:-NUM_FLAGS]

    @property
    def to_sum_N(self) -> Tensor:
        """Return the tensor to sum over ranks, in place, between the last forward and average_()."""
        return self.flat_N

    @property
    def input_failed_1(self) -> Tensor:
        """Show the flag, as a view: 1 on a rank that has no batch for this step; summed, above 0 where any has none."""
        return self.flat_N[-NUM_FLAGS:]

    def tell_(self, *, input_failed: bool) -> None:
        """Set the flag of this rank, without a host sync."""
        self.input_failed_1.fill_(float(input_failed))  # x[-1] = number would wait for a GPU

    def take_beyond(self) -> int:
        """Return the number of statistics that could not be summed since the last call: 0."""
        return 0

    def average_(self, *, num_ranks: int, before_N: Tensor) -> Tensor:
        """Turn sums over ranks into means, or restore before_N if a rank had no batch; return whether one had none.

        No host sync: what is returned has one element, on the device.
        """
        self.flat_N.div_(num_ranks)
        has_failed_1 = self.input_failed_1 > 0
        # where on the device: an if would wait for the flag
        self.flat_N.copy_(torch.where(has_failed_1, before_N, self.flat_N))
        return has_failed_1


STATISTICS_BITS = 32
"""Fraction bits of running means and variances: steps of 2e-10, sums up to 2**30."""


class GridStatistics(StepStatistics):
    """Sums the statistics of each microbatch on a grid: their mean over a step has the same bits in any order.

    microbatches: those of all ranks together in a step.
    """

    def __init__(self, flat_N: Tensor, *, microbatches: int) -> None:
        super().__init__(flat_N)
        self._grid = Grid(microbatches, fraction_bits=STATISTICS_BITS)
        self._momentum = 0.0
        self._num_beyond_1 = torch.zeros(1, dtype=torch.int64, device=flat_N.device)
        count = self.running_N.numel()
        # behind the statistics what the grid counts, and the flag
        self._sums_N = torch.zeros(count + 1 + NUM_FLAGS, dtype=torch.int64, device=flat_N.device)

    def take_(self, gathered_N: Tensor, momentum: float) -> None:
        """Add the mean over the ghost batches of a microbatch, like running_N; momentum: of all norms."""
        self._momentum = momentum
        self._grid.add_(self._sums_N[:-NUM_FLAGS], gathered_N)

    @property
    def to_sum_N(self) -> Tensor:
        """Return the sums on the grid, and the flag."""
        return self._sums_N

    @property
    def input_failed_1(self) -> Tensor:
        """Show the flag, as a view of what travels."""
        return self._sums_N[-NUM_FLAGS:]

    def average_(self, *, num_ranks: int, before_N: Tensor) -> Tensor:
        """Move the running statistics by the mean of the sums over ranks, as StepStatistics does; begin new sums."""
        has_failed_1 = self.input_failed_1 > 0
        mean_N = torch.empty_like(self.running_N)
        self._grid.read_(mean_N, self._sums_N[:-NUM_FLAGS])
        mean_N.div_(self._grid.num_terms)
        moved_N = torch.lerp(before_N[:-NUM_FLAGS], mean_N, self._momentum)
        self.running_N.copy_(torch.where(has_failed_1, before_N[:-NUM_FLAGS], moved_N))
        self._num_beyond_1 += torch.where(has_failed_1, 0, self._sums_N[-NUM_FLAGS - 1 : -NUM_FLAGS])
        self._sums_N.zero_()
        return has_failed_1

    def take_beyond(self) -> int:
        """Count statistics of microbatches that were beyond the grid since the last call. Waits for the device."""
        count = int(self._num_beyond_1)
        self._num_beyond_1.zero_()
        return count
