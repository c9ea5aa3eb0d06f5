"""Sums of run.reproducible with the same bits for any division: batch norm's statistics, norms of tensors in pieces."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bigbatch.comm.gradients.grid import CPU_PORTION, SUM_BITS, Grid
from bigbatch.errors import ConfigError
from bigbatch.trainer.step.statistics import NUM_FLAGS, StepStatistics

Together = Callable[[Tensor], Tensor]
"""Combines the vectors (N) of all ranks into one. Collective."""


def exact_norms(pieces: Sequence[Tensor], *, max_elements: int, all_maxima: Together, all_sums: Together) -> Tensor:
    """Return the L2 norms (N) of tensors that lie in pieces, perhaps empty, on the ranks. Collective.

    Each square is rounded once to a multiple of a grid spacing, and these are summed in int64: any order and any pieces
    give the same bits. The spacing depends on a tensor's largest number, which the ranks exchange first, and lets a sum
    of max_elements squares fit: below 2**22 elements it is 2**-40 of the largest square, and the error of a square is
    at most half the spacing. A number that is not finite makes its norm infinite. No host sync.
    all_maxima: in fp32, NaN if any is NaN; all_sums: in int64.
    """
    bits = (SUM_BITS - max_elements.bit_length()) // 2
    largest = [
        torch.linalg.vector_norm(piece, ord=torch.inf).float()
        if piece.numel()
        else piece.new_zeros((), dtype=torch.float32)
        for piece in pieces
    ]
    peaks_N = all_maxima(torch.stack(largest)).double()
    # an infinite peak or NaN has factor 0 here, and an infinite norm below
    factors_N = torch.where((peaks_N > 0) & peaks_N.isfinite(), 2.0**bits / peaks_N, 0.0)
    squares_N = torch.stack([_squares(*pair) for pair in zip(pieces, factors_N.unbind(), strict=True)])
    norms_N = all_sums(squares_N).double().sqrt_() * peaks_N / 2.0**bits
    return torch.where(peaks_N.isfinite(), norms_N, torch.inf).float()


def _squares(piece: Tensor, factor: Tensor) -> Tensor:
    """Return the sum of (piece * factor)**2, each rounded to a whole number; the same bits on any device."""
    flat_N = piece.as_strided((piece.numel(),), (1,))
    portions = flat_N.split(CPU_PORTION) if flat_N.device.type == "cpu" else (flat_N,)
    sums = [portion_N.double().mul_(factor).square_().round_().to(torch.int64).sum() for portion_N in portions]
    return torch.stack(sums).sum()


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
        self.to_sum_N = torch.zeros(running_N.numel() + 1 + NUM_FLAGS, dtype=torch.int64, device=running_N.device)

    def start_over(self) -> None:
        super().start_over()
        self._num_beyond_1.zero_()

    def take_(self, gathered_N: Tensor, momentum: float) -> None:
        """Add the mean over the ghost batches of a microbatch, on the grid."""
        self._momentum = momentum
        self._grid.add_(self.to_sum_N[:-NUM_FLAGS], gathered_N)

    def average_(self) -> Tensor:
        """Move the running statistics as StepStatistics does, and count values out of range."""
        # before the sums begin again; a step that does not count has none
        num_beyond_1 = torch.where(self.to_sum_N[-NUM_FLAGS:] > 0, 0, self.to_sum_N[-NUM_FLAGS - 1 : -NUM_FLAGS])
        self._num_beyond_1 += num_beyond_1
        return super().average_()

    def _mean(self) -> Tensor:
        mean_N = torch.empty_like(self.running_N)
        self._grid.read_(mean_N, self.to_sum_N[:-NUM_FLAGS])
        return mean_N.div_(self._num_terms)

    def take_beyond(self) -> int:
        """Return the number of statistics out of the grid's range since the last call. Waits for the device."""
        count = int(self._num_beyond_1)
        self._num_beyond_1.zero_()
        return count


def refuse_own_state(model: nn.Module) -> None:
    """Make the first training forward of model raise ConfigError that names a buffer, if it changes one.

    Each rank's forwards would change it by their own microbatches: spectral norm's vectors, centers, counters.
    """
    before: dict[str, Tensor] = {}

    def remember(model: nn.Module, _inputs: object) -> None:
        if model.training:
            before.update({name: buffer.clone() for name, buffer in model.named_buffers()})

    def compare(model: nn.Module, _inputs: object, _logits: object) -> None:
        if not model.training:
            return
        for handle in handles:
            handle.remove()
        changed = [name for name, buffer in model.named_buffers() if not buffer.equal(before[name])]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ConfigError(
                f"run.reproducible=True cannot keep {changed[0]}{more}, which the model changes in its forward, on "
                "each rank by its own microbatches: set it to false, or take a model without"
            )

    # compare runs before the present hooks, one of which changes a norm's statistics
    handles = (model.register_forward_pre_hook(remember), model.register_forward_hook(compare, prepend=True))
