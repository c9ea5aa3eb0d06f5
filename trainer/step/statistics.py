"""Numbers besides the gradients that all ranks sum in every step."""

import torch
from torch import Tensor

NUM_FLAGS = 1
"""Elements behind the running statistics: 1 if this rank has no batch for the step; summed: above 0 if one has none."""


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
        self.to_sum_N = running_N.new_zeros(running_N.numel() + NUM_FLAGS)
        """To sum over ranks, in place, between the last forward and average_()."""

    def start_over(self) -> None:
        """Begin new sums, in other memory: a thread that has not noticed a lost rank may still write to the former."""
        self.to_sum_N = torch.zeros_like(self.to_sum_N)

    def take_(self, gathered_N: Tensor, momentum: float) -> None:
        """Add a microbatch: gathered_N, laid out like running_N, is its ghost batches' mean. momentum: of all norms."""
        self._momentum = momentum
        self.to_sum_N[:-NUM_FLAGS].add_(gathered_N)

    def tell_failure_(self) -> None:
        """Set the flag of this rank until average_(), without a host sync."""
        self.to_sum_N[-NUM_FLAGS:].fill_(1.0)  # x[-1] = number would wait for a GPU

    def average_(self) -> Tensor:
        """Move the running statistics by the mean of the sums over ranks, unless a rank had no batch; begin new sums.

        Returns whether a rank had no batch, as one element on the device. No host sync.
        """
        is_skipped_1 = self.to_sum_N[-NUM_FLAGS:] > 0
        moved_N = torch.lerp(self.running_N, self._mean(), self._momentum)
        # where on the device: an if would wait for the flag
        self.running_N.copy_(torch.where(is_skipped_1, self.running_N, moved_N))
        self.to_sum_N.zero_()
        return is_skipped_1

    def _mean(self) -> Tensor:
        return self.to_sum_N[:-NUM_FLAGS] / self._num_terms
