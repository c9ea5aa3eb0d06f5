"""Numbers besides the gradients that all ranks sum in every step."""

import torch
from torch import Tensor

from bigbatch.comm.gradients.grid import Grid

NUM_FLAGS = 1
"""Elements behind the running statistics: whether this rank's input failed."""


class StepStatistics:
    """Sums batch norm's statistics, and the flag of a failed input, over ranks: one flat fp32 tensor, one all-reduce.

    The running statistics move once per step, by the mean over its microbatches; forward does not change them. The
    flag needs no separate sum because the statistics are summed in every step anyway (docs/decisions/020).
    running_N: as flatten_running_statistics returns them. microbatches: number of those of all ranks in a step.
    """

    unseen: float | None = None
    """Replaces the statistics of a norm that a forward skipped; None: those of its last forward count again."""

    def __init__(self, running_N: Tensor, *, microbatches: int) -> None:
        self.running_N = running_N
        self._num_terms = microbatches
        self._momentum = 0.0
        self._sums_N = running_N.new_zeros(running_N.numel() + NUM_FLAGS)

    def start_over(self) -> None:
        """Begin new sums, in other memory: a thread that has not noticed a lost rank may still write to the former."""
        self._sums_N = torch.zeros_like(self._sums_N)

    def take_(self, gathered_N: Tensor, momentum: float) -> None:
        """Add a microbatch: gathered_N, laid out like running_N, is its ghost batches' mean. momentum: of all norms."""
        self._momentum = momentum
        self._sums_N[:-NUM_FLAGS].add_(gathered_N)

    @property
    def to_sum_N(self) -> Tensor:
        """Return the tensor to sum over ranks, in place, between the last forward and average_()."""
        return self._sums_N

    @property
    def input_failed_1(self) -> Tensor:
        """Return a view of the flag: 1 if this rank has no batch for the step; summed: above 0 if any lacks one."""
        return self._sums_N[-NUM_FLAGS:]

    def tell_(self, *, input_failed: bool) -> None:
        """Set the flag of this rank, without a host sync."""
        self.input_failed_1.fill_(float(input_failed))  # x[-1] = number would wait for a GPU

    def take_beyond(self) -> int:
        """Return the number of statistics that could not be summed since the last call: always 0 in fp32."""
        return 0

    def average_(self) -> Tensor:
        """Move the running statistics by the mean of the sums over ranks, unless a rank had no batch; begin new sums.

        Returns whether a rank had no batch, as one element on the device. No host sync.
        """
        is_skipped_1 = self.input_failed_1 > 0
        moved_N = torch.lerp(self.running_N, self._mean(), self._momentum)
        # where on the device: an if would wait for the flag
        self.running_N.copy_(torch.where(is_skipped_1, self.running_N, moved_N))
        self._sums_N.zero_()
        return is_skipped_1

    def _mean(self) -> Tensor:
        return self._sums_N[:-NUM_FLAGS] / self._num_terms


STATISTICS_BITS = 32
"""Fraction bits of running means and variances: multiples of 2e-10, sums up to 2**30."""


class GridStatistics(StepStatistics):
    """Sums the statistics on a fixed-point grid, in int64: their mean over a step has the same bits in any order."""

    unseen = 1e30  # out of every grid's range, but finite, so that 0 times it is 0

    def __init__(self, running_N: Tensor, *, microbatches: int) -> None:
        super().__init__(running_N, microbatches=microbatches)
        self._grid = Grid(microbatches, fraction_bits=STATISTICS_BITS)
        self._num_beyond_1 = torch.zeros(1, dtype=torch.int64, device=running_N.device)
        # after the statistics: the count of values out of range, and the flag
        self._sums_N = torch.zeros(running_N.numel() + 1 + NUM_FLAGS, dtype=torch.int64, device=running_N.device)

    def start_over(self) -> None:
        super().start_over()
        self._num_beyond_1.zero_()

    def take_(self, gathered_N: Tensor, momentum: float) -> None:
        """Add the mean over the ghost batches of a microbatch, on the grid."""
        self._momentum = momentum
        self._grid.add_(self._sums_N[:-NUM_FLAGS], gathered_N)

    def average_(self) -> Tensor:
        """Move the running statistics as StepStatistics does, and count values out of range."""
        # before the sums begin again; a step that does not count has none
        num_beyond_1 = torch.where(self.input_failed_1 > 0, 0, self._sums_N[-NUM_FLAGS - 1 : -NUM_FLAGS])
        self._num_beyond_1 += num_beyond_1
        return super().average_()

    def _mean(self) -> Tensor:
        mean_N = torch.empty_like(self.running_N)
        self._grid.read_(mean_N, self._sums_N[:-NUM_FLAGS])
        return mean_N.div_(self._num_terms)

    def take_beyond(self) -> int:
        """Return the number of statistics out of the grid's range since the last call. Waits for the device."""
        count = int(self._num_beyond_1)
        self._num_beyond_1.zero_()
        return count
