"""Inverse fourth roots of symmetric matrices by their eigenvalues, of all matrices of one size at once."""

from collections import defaultdict

import torch
from torch import Tensor


def inverse_fourth_root(matrices_BNN: Tensor, *, eps: float) -> Tensor:
    """Return A ** (-1/4) of each positive semidefinite A; smaller eigenvalues count as eps times the largest.

    A matrix of zeros gives eps ** (-1/4) times the identity; one that is not finite gives NaN, which the check for a
    diverged run finds, while LAPACK would raise.
    """
    is_finite_B11 = matrices_BNN.isfinite().all(dim=(1, 2), keepdim=True)
    identity_NN = torch.eye(matrices_BNN.size(-1), dtype=torch.float64, device=matrices_BNN.device)
    doubled_BNN = torch.where(is_finite_B11, matrices_BNN.double(), identity_NN)
    scale_B11 = doubled_BNN.abs().amax(dim=(1, 2), keepdim=True)
    scale_B11 = torch.where(scale_B11 > 0, scale_B11, torch.ones_like(scale_B11))
    values_BN, vectors_BNN = _eigh(doubled_BNN / scale_B11)
    largest_B1 = values_BN[:, -1:]
    largest_B1 = torch.where(largest_B1 > 0, largest_B1, torch.ones_like(largest_B1))
    powers_BN = (values_BN / largest_B1).clamp(min=eps).pow(-0.25) * (largest_B1 * scale_B11.squeeze(2)).pow(-0.25)
    roots_BNN = (vectors_BNN * powers_BN.unsqueeze(1)) @ vectors_BNN.mT
    return torch.where(is_finite_B11, roots_BNN, torch.full_like(identity_NN, torch.nan)).to(matrices_BNN.dtype)


def _eigh(matrices_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of fp64 matrices with largest element 1.

    LAPACK does not converge for some of low rank with rows of zeros, as where a convolution sees nothing but padding:
    in fp32 for many, in fp64 for few, and by chance. With 1 added on the diagonal they have the same vectors.
    """
    try:
        values_BN, vectors_BNN = torch.linalg.eigh(matrices_BNN)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # its stub lacks the name
        identity_NN = torch.eye(matrices_BNN.size(-1), dtype=matrices_BNN.dtype, device=matrices_BNN.device)
        values_BN, vectors_BNN = torch.linalg.eigh(matrices_BNN + identity_NN)
        values_BN = values_BN - 1
    return values_BN, vectors_BNN


def inverse_fourth_roots(tensors: list[Tensor], *, eps: float) -> list[Tensor]:
    """Return the roots of square matrices; those of one size, device and dtype go through one decomposition."""
    alike: dict[object, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        alike[tensor.shape, tensor.device, tensor.dtype].append(index)
    results = list(tensors)
    for indices in alike.values():
        found_BNN = inverse_fourth_root(torch.stack([tensors[index] for index in indices]), eps=eps)
        for index, found_NN in zip(indices, found_BNN.unbind(), strict=True):
            results[index] = found_NN
    return results
