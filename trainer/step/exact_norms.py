"""Norms of tensors in pieces on many ranks, with the same bits for any division."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigbatch.comm.gradients.grid import CPU_PORTION, SUM_BITS

Together = Callable[[Tensor], Tensor]
"""Collective: combines a vector (N) of each rank into one."""


def exact_norms(pieces: Sequence[Tensor], *, most_elements: int, all_maxima: Together, all_sums: Together) -> Tensor:
    """Return the L2 norms (N) of tensors that lie in pieces, perhaps empty, on the ranks. Collective.

    Each square is rounded once to a whole number of steps, which are sums of int64 then: in any order, of any pieces.
    The step is of the largest number of a tensor, which every rank knows before, and so small that most_elements of
    them have room: below 2**22 it is 2**-40 of the largest square, and no square is off by more than half of it.
    A number that is not finite makes its norm infinite. all_maxima: fp32, of NaN is NaN; all_sums: int64. No host sync.
    """
    bits = (SUM_BITS - most_elements.bit_length()) // 2
    largest = [
        torch.linalg.vector_norm(piece, ord=torch.inf).float()
        if piece.numel()
        else piece.new_zeros((), dtype=torch.float32)
        for piece in pieces
    ]
    peaks_N = all_maxima(torch.stack(largest)).double()
    # 0 / 0 and what is divided by infinity is put right below
    factors_N = torch.where((peaks_N > 0) & peaks_N.isfinite(), 2.0**bits / peaks_N, 0.0)
    squares_N = torch.stack([_squares(*pair) for pair in zip(pieces, factors_N.unbind(), strict=True)])
    norms_N = all_sums(squares_N).double().sqrt_() * peaks_N / 2.0**bits
    return torch.where(peaks_N.isfinite(), norms_N, torch.inf).float()


def _squares(piece: Tensor, factor: Tensor) -> Tensor:
    """Return the sum of (piece * factor)**2, each rounded to a whole number: each step of it is the same anywhere."""
    flat_N = piece.as_strided((piece.numel(),), (1,))
    portions = flat_N.split(CPU_PORTION) if flat_N.device.type == "cpu" else (flat_N,)
    sums = [portion_N.double().mul_(factor).square_().round_().to(torch.int64).sum() for portion_N in portions]
    return torch.stack(sums).sum()
