"""Norms of tensors in pieces on many ranks, with the same bits for any division."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigbatch.comm.gradients.grid import CPU_PORTION, SUM_BITS

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
