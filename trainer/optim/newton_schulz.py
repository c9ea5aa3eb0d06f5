"""Orthogonalisation by Newton and Schulz's iteration, of all matrices of one shape at once."""

import math
from collections import defaultdict

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of p(s) = a s + b s**3 + c s**5 by Jordan et al. 2024: steep at 0, so that five steps suffice.

Source: https://kellerjordan.github.io/posts/muon, github.com/KellerJordan/Muon; torch.optim.Muon has the same.
"""
SMALLEST_NORM = 1e-7
"""Least divisor: a matrix with a smaller norm is divided by this, as in the source."""


def newton_schulz(
    matrices_BMN: Tensor, *, steps: int, coefficients: tuple[float, float, float] = COEFFICIENTS
) -> Tensor:
    """Replace each singular value s of each matrix by p(p(... p(s / f))), p applied so many times; f: Frobenius norm.

    With the usual coefficients and five steps, those of at least a 660th of f end between 0.68 and 1.21: not the
    nearest orthogonal matrix, but near one; smaller ones grow 485-fold. It takes steps * (4 m**2 n + 2 m**3)
    multiplications and additions a matrix, m <= n.
    """
    a, b, c = coefficients
    is_tall = matrices_BMN.size(-2) > matrices_BMN.size(-1)
    x_BMN = matrices_BMN.mT if is_tall else matrices_BMN
    for _ in range(steps):
        gram_BMM = x_BMN @ x_BMN.mT
        polynomial_BMM = torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c)
        x_BMN = torch.baddbmm(x_BMN, polynomial_BMM, x_BMN, beta=a)
    return x_BMN.mT if is_tall else x_BMN


def orthogonalised(tensors: list[Tensor], *, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Orthogonalise tensors as matrices of their first dimension by all others, in dtype: copies, laid out alike.

    Those of one shape, layout, device and dtype go through one product together.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        alike[tensor.shape, tensor.stride(), tensor.device, tensor.dtype].append(index)
    results = list(tensors)
    for indices in alike.values():
        shape, strides = tensors[indices[0]].shape, _by_rows(tensors[indices[0]])
        matrices_BMN = tensors[indices[0]].new_empty((len(indices), shape[0], math.prod(shape[1:])))
        laid_out = [matrix_MN.as_strided(shape, strides) for matrix_MN in matrices_BMN.unbind()]
        torch._foreach_copy_(laid_out, [tensors[index] for index in indices])
        # in the tensors' own precision: in bf16 the norm itself would be 0.4% off
        norms_B11 = torch.linalg.vector_norm(matrices_BMN, dim=(1, 2), keepdim=True).clamp_(min=SMALLEST_NORM)
        found_BMN = newton_schulz(matrices_BMN.div_(norms_B11).to(dtype), steps=steps).contiguous()
        for index, found_MN in zip(indices, found_BMN.unbind(), strict=True):
            results[index] = found_MN.as_strided(shape, strides)
    return results


def _by_rows(tensor: Tensor) -> tuple[int, ...]:
    """Return strides that keep rows together: the tensor's own where its rows are (channels-last, too).

    Columns then come in the order of memory: the orthogonal factor of G P is that of G times P, for any permutation P.
    """
    if tensor.stride(0) * tensor.size(0) == tensor.numel():
        return tensor.stride()
    return tensor.new_empty(tensor.shape, device="meta").stride()


def cost(shape: torch.Size) -> float:
    """Return the operations of a step with a matrix of the first dimension by all others."""
    rows, columns = shape[0], math.prod(shape[1:])
    short, long = sorted((rows, columns))
    return 4.0 * short**2 * long + 2.0 * short**3
