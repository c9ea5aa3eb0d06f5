"""What all ranks sum in every step beside the gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_FLAGS = 1
"""Elements behind the running statistics: whether this rank's input failed."""


@dataclass(frozen=True)
class StepStatistics:
    """Holds batch norm's running statistics, and whether a rank's input failed: one flat fp32 tensor, one all-reduce.

    The flag rides along because the statistics are summed in every step anyway (docs/decisions/020).
    """

    flat_N: Tensor
    """The running statistics of all norms, and NUM_FLAGS elements behind them."""

    @property
    def running_N(self) -> Tensor:
        """Show the running statistics alone, as a view."""
        return self.flat_N[:-NUM_FLAGS]

    @property
    def input_failed_1(self) -> Tensor:
        """Show the flag, as a view: 1 on a rank that has no batch for this step; summed, above 0 where any has none."""
        return self.flat_N[-NUM_FLAGS:]

    def tell_(self, *, input_failed: bool) -> None:
        """Set the flag of this rank, without a host sync."""
        self.input_failed_1.fill_(float(input_failed))  # x[-1] = number would wait for a GPU

    def average_(self, *, num_ranks: int, before_N: Tensor) -> Tensor:
        """Make means of the sums over ranks, or before_N where a rank had no batch; return whether one had none (bool).

        No host sync: what is returned has one element, on the device.
        """
        self.flat_N.div_(num_ranks)
        has_failed_1 = self.input_failed_1 > 0
        # where on the device: an if would wait for the flag
        self.flat_N.copy_(torch.where(has_failed_1, before_N, self.flat_N))
        return has_failed_1
