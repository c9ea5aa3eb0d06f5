"""Newton and Schulz's iteration against closed forms: what it does to singular values, and the orthogonal factor."""

import math

import pytest
import torch

from bigbatch.trainer.optim.muon import COEFFICIENTS, cost, newton_schulz, orthogonalised

torch.set_num_threads(1)

SHAPES = [(5, 5), (3, 8), (8, 3), (1, 4)]
A, B, C = COEFFICIENTS


def polynomial(s):
    return A * s + B * s**3 + C * s**5


def random_orthogonal(rows, columns, *, generator):
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64)).Q


def with_singular_values(values_M, *, rows, columns, seed=0):
    """U diag(values) V^T, and its U and V."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (random_orthogonal(size, len(values_M), generator=generator) for size in (rows, columns))
    return u @ values_M.diag() @ v.T, u, v


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(rows, columns, steps):
    values = torch.linspace(0.02, 0.9, min(rows, columns), dtype=torch.float64)
    matrix, u, v = with_singular_values(values, rows=rows, columns=columns)
    for _ in range(steps):
        values = polynomial(values)
    found = newton_schulz(matrix[None], steps=steps)[0]
    torch.testing.assert_close(found, u @ values.diag() @ v.T, rtol=1e-10, atol=1e-10)


def test_newton_schulz_bounds_follow_from_the_polynomials_extremes():
    """p has its extremes where p' = a + 3 b s**2 + 5 c s**4 is 0: it rises to its top, falls to its bottom, rises.

    So [p(bottom), p(top)] is mapped into itself, and what lies below it rises into it, or stays below.
    """
    root = math.sqrt(9 * B * B - 20 * A * C)
    top, bottom = (math.sqrt((-3 * B + sign * root) / (10 * C)) for sign in (-1, 1))
    low, high = polynomial(bottom), polynomial(top)
    assert top < low < bottom < high
    assert low < polynomial(high) < polynomial(low) < high
    assert (round(low, 2), round(high, 2)) == (0.68, 1.20)
    smallest = low
    for _ in range(5):
        below, above = 0.0, top
        while above - below > 1e-15:  # where p rises, by bisection
            middle = (below + above) / 2
            below, above = (middle, above) if polynomial(middle) < smallest else (below, middle)
        smallest = above
    values = torch.linspace(smallest, 1.0, 20_000, dtype=torch.float64)
    for _ in range(5):
        values = polynomial(values)
    assert low * (1 - 1e-9) <= float(values.min())
    assert float(values.max()) <= high
    assert 1 / 670 < smallest < 1 / 660


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (6, 40), (40, 6), (3, 2, 1, 5)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_orthogonalised_takes_filters_as_rows_in_any_layout(shape, memory_format):
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)]
    if len(shape) == 4:
        tensors = [t.to(memory_format=memory_format) for t in tensors]
    before = [t.clone() for t in tensors]
    found = orthogonalised(tensors, steps=5, dtype=torch.float64)
    for tensor, result, kept in zip(tensors, found, before, strict=True):
        matrix = tensor.flatten(1)
        u, values, vh = torch.linalg.svd(matrix / torch.linalg.matrix_norm(matrix), full_matrices=False)
        for _ in range(5):
            values = polynomial(values)
        torch.testing.assert_close(result.flatten(1), u @ values.diag() @ vh, rtol=1e-9, atol=1e-9)
        assert (result.shape, result.stride()) == (tensor.shape, tensor.stride())
        assert torch.equal(tensor, kept)


def test_orthogonalised_takes_a_transposed_matrix_and_other_shapes_beside_it():
    plain = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    others = [torch.randn(3, 5), plain.T.contiguous().T, torch.zeros(4, 4)]
    found = orthogonalised([plain, *others], steps=5, dtype=torch.float32)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-6)
    assert not found[3].any()  # and no NaN of 0 / 0


def test_orthogonalised_divides_what_is_next_to_nothing_by_the_smallest_norm():
    """Norm 1e-9 is divided by the source's least norm, 1e-7: a hundredth; norm 1e-6 by itself."""
    small, own = (norm * torch.eye(1, dtype=torch.float64) for norm in (1e-9, 1e-6))
    found = orthogonalised([small, own], steps=1, dtype=torch.float64)
    assert float(found[0]) == pytest.approx(polynomial(0.01), rel=1e-9)
    assert float(found[1]) == pytest.approx(polynomial(1.0), rel=1e-9)


def test_newton_schulz_cost_counts_its_products():
    """A product of m x k by k x n takes 2 m k n: G G^T, its square, and the polynomial times G."""
    m, n = 4, 3 * 5 * 5
    counted = 2 * m * n * m + 2 * m * m * m + 2 * m * m * n
    assert cost(torch.Size((m, 3, 5, 5))) == cost(torch.Size((n, m))) == counted
