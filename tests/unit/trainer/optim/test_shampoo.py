"""Shampoo against a float64 oracle written from its formula, when roots are due, and what it refuses."""

import numpy as np
import pytest
import torch
from optimizer_steps import (
    DEVICES,
    assert_same_bits,
    assert_steps_follow,
    clones,
    groups_of,
    random_weights,
    set_random_grads,
)

from bigbatch.trainer.optim.shampoo import Shampoo, block_shapes, inverse_fourth_root, inverse_fourth_roots

torch.set_num_threads(1)


class Oracle:
    """Shampoo on one tensor in float64, block by block, by dense eigenvalues."""

    def __init__(self, weight, *, momentum, nesterov, weight_decay, block_size, root_every_steps, factor_decay, eps):
        self.weight = np.array(weight, np.float64)
        self.v, self.steps, self.factors, self.roots = np.zeros_like(self.weight), 0, {}, {}
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.block_size, self.every, self.decay, self.eps = block_size, root_every_steps, factor_decay, eps

    def root(self, matrix):
        values, vectors = np.linalg.eigh(matrix)
        return vectors @ np.diag(np.maximum(values, self.eps * values.max()) ** -0.25) @ vectors.T

    def preconditioned(self, grad):
        matrix = grad.reshape(len(grad), -1)
        # 9 columns in blocks of at most 4: 3, 3 and 3
        rows, columns = (np.array_split(np.arange(n), -(-n // self.block_size)) for n in matrix.shape)
        out = np.zeros_like(matrix)
        for i, of_rows in enumerate(rows):
            for j, of_columns in enumerate(columns):
                where = np.ix_(of_rows, of_columns)
                block = matrix[where]
                for side, gram in ((0, block @ block.T), (1, block.T @ block)):
                    key = i, j, side
                    self.factors[key] = self.decay * self.factors.get(key, 0) + (1 - self.decay) * gram
                    if self.steps % self.every == 0:
                        self.roots[key] = self.root(self.factors[key])
                out[where] = self.roots[i, j, 0] @ block @ self.roots[i, j, 1]
        self.steps += 1
        return out.reshape(grad.shape) * np.linalg.norm(grad) / np.linalg.norm(out)

    def step(self, grad, lr):
        grad = np.array(grad, np.float64)
        update = self.preconditioned(grad) if self.weight.ndim > 1 else grad
        update = update + self.weight_decay * self.weight
        self.v = self.momentum * self.v + update
        self.weight = self.weight - lr * (update + self.momentum * self.v if self.nesterov else self.v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-3), (torch.float64, 1e-8)])
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "nesterov": True, "block_size": 100, "root_every_steps": 3, "factor_decay": 0.9},
        {"momentum": 0.0, "nesterov": False, "block_size": 4, "root_every_steps": 1, "factor_decay": 0.5},
    ],
)
def test_shampoo_steps_follow_the_formula(settings, dtype, rtol, device):
    """Twelve of them; gradients come from outside, so that rounding adds up and does not grow."""
    weights = random_weights(dtype=dtype, device=device)
    settings = {**settings, "weight_decay": 0.01, "eps": 1e-3}
    oracles = [Oracle(w.tolist(), **settings) for w in weights]
    optimizer = Shampoo(groups_of(weights), lr=1.0, **settings)
    assert_steps_follow(oracles, optimizer, weights, num_steps=12, rtol=rtol)


@pytest.mark.parametrize(("scale", "dtype", "rtol"), [(1.0, torch.float64, 1e-9), (1e-30, torch.float32, 1e-3)])
def test_inverse_fourth_root_to_the_fourth_is_the_inverse(scale, dtype, rtol):
    """Also for gradients of 1e-15: their squares times eps are below what fp32 holds."""
    generator = torch.Generator().manual_seed(0)
    half_BNN = torch.randn(3, 6, 6, generator=generator, dtype=torch.float64)
    matrices_BNN = half_BNN @ half_BNN.mT + 0.5 * torch.eye(6, dtype=torch.float64)
    found_BNN = inverse_fourth_root((scale * matrices_BNN).to(dtype), eps=1e-12).double()
    power_BNN = torch.linalg.matrix_power(scale**0.25 * found_BNN, 4)
    torch.testing.assert_close(power_BNN, torch.linalg.inv(matrices_BNN), rtol=rtol, atol=rtol)


def test_inverse_fourth_root_of_a_matrix_without_full_rank_has_a_floor():
    matrix_NN = torch.diag(torch.tensor([16.0, 1e-9, 0.0], dtype=torch.float64))
    found_NN = inverse_fourth_root(matrix_NN[None], eps=1e-4)[0]
    expected = torch.diag(torch.tensor([0.5, 5.0, 5.0], dtype=torch.float64))
    torch.testing.assert_close(found_NN, expected, rtol=1e-9, atol=1e-9)


def test_inverse_fourth_root_of_what_sees_padding_alone():
    """One of 9 places of a kernel has gradients: in fp32 LAPACK's eigenvalues do not converge."""
    generator = torch.Generator().manual_seed(0)
    grad_MN = torch.randn(64, 64, 9, generator=generator)
    grad_MN[:, :, 1:] = 0
    factor_NN = grad_MN.flatten(1).mT @ grad_MN.flatten(1)
    values, vectors = np.linalg.eigh(factor_NN.double().numpy())
    expected = torch.tensor((vectors * np.maximum(values, 1e-6 * values.max()) ** -0.25) @ vectors.T)
    found_NN = inverse_fourth_root(factor_NN[None], eps=1e-6)[0].double()
    torch.testing.assert_close(found_NN, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_inverse_fourth_root_where_lapack_does_not_converge(monkeypatch):
    """LAPACK sometimes fails on rows of zeros, depending on its version, so the failure is simulated."""
    decompose, calls = torch.linalg.eigh, []

    def eigh(matrices):
        calls.append(matrices)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("failed to converge")
        return decompose(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    roots_BNN = inverse_fourth_root(torch.diag_embed(torch.tensor([[16e-8, 1e-8, 0.0], [0.0, 0.0, 81.0]])), eps=1e-4)
    expected_BN = [[1e2 / 2, 1e2, 1e3 / 2], [10 / 3, 10 / 3, 1 / 3]]  # the floor is a ten-thousandth of the largest
    np.testing.assert_allclose(roots_BNN, torch.diag_embed(torch.tensor(expected_BN)), rtol=1e-5, atol=1e-9)
    assert len(calls) == 2


def test_inverse_fourth_roots_of_zeros_and_of_what_is_not_finite():
    bad_NN = torch.eye(2)
    bad_NN[0, 1] = torch.nan
    zeros_NN, found_NN, single_11 = inverse_fourth_roots([torch.zeros(2, 2), bad_NN, torch.ones(1, 1)], eps=1e-4)
    torch.testing.assert_close(zeros_NN, 10 * torch.eye(2))
    assert found_NN.isnan().all()
    assert single_11.item() == pytest.approx(1.0)


def test_shampoo_counts_updates_not_calls_to_the_next_roots():
    """Roots are those of a run without the skipped calls, wherever these lie, also after a resume."""
    ends = []
    for skipped in ((), (0,), (1, 2), (3, 3, 4)):
        weights = random_weights()[:2]
        optimizer = Shampoo(weights, lr=0.1, root_every_steps=3)
        for seed in range(7):
            for _ in range(skipped.count(seed)):
                set_random_grads(weights, seed=99)
                weights[0].grad[0] = torch.inf
                optimizer.found_inf = torch.ones(())
                optimizer.step()
            if seed == 5:
                state = optimizer.state_dict()
                optimizer = Shampoo(weights, lr=0.1, root_every_steps=3)
                optimizer.load_state_dict(state)
            set_random_grads(weights, seed=seed)
            optimizer.found_inf = torch.zeros(())
            optimizer.step()
        assert [int(optimizer.state[w]["step"]) for w in weights] == [7, 7]
        ends.append((clones(weights), clones(optimizer.state[w]["roots"] for w in weights)))
    for end in ends[1:]:
        assert_same_bits(end, ends[0])


def test_shampoo_asks_the_device_only_where_roots_are_due(monkeypatch):
    weights = random_weights()[:2]
    optimizer = Shampoo(weights, lr=0.1, root_every_steps=4)
    asked = []
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: asked.append(tensor) or int(tensor.item()))
    counts = []
    for seed in range(9):
        set_random_grads(weights, seed=seed)
        optimizer.step()
        counts.append(len(asked))
    assert counts == [2] * 4 + [4] * 4 + [6]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 9), [(4, 5), (4, 4), (4, 5), (4, 4)]), ((3, 2, 2, 1), [(3, 4)]), ((6, 1), [(3, 1), (3, 1)])],
)
def test_block_shapes_are_as_equal_as_they_can_be(shape, expected):
    assert block_shapes(shape, block_size=5) == expected
