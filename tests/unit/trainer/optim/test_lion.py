"""Lion against a float64 oracle written from the paper; test_fused.py has what it promises like the others."""

import numpy as np
import pytest
import torch
from optimizer_steps import DEVICES, assert_same_bits, assert_steps_follow, clones, random_weights, set_random_grads

from bigbatch.trainer.optim.fused import PLAIN_SGD
from bigbatch.trainer.optim.lion import Lion

torch.set_num_threads(1)


class Oracle:
    """Lion on one tensor in float64, line by line from algorithm 2 of the paper."""

    def __init__(self, weight, *, betas, weight_decay):
        self.weight, (self.beta1, self.beta2), self.weight_decay = np.array(weight, np.float64), betas, weight_decay
        self.m = np.zeros_like(self.weight)

    def step(self, grad, lr):
        grad = np.array(grad, np.float64)
        direction = np.sign(self.beta1 * self.m + (1 - self.beta1) * grad)
        self.weight = self.weight - lr * (direction + self.weight_decay * self.weight)
        self.m = self.beta2 * self.m + (1 - self.beta2) * grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("settings", [{"betas": (0.9, 0.99), "weight_decay": 0.1}, {"betas": (0.0, 0.5)}])
def test_lion_steps_follow_the_formula(settings, dtype, rtol, device):
    settings = {"weight_decay": 0.0, **settings}
    weights = random_weights(0, dtype=dtype, device=device)
    oracles = [Oracle(weight.tolist(), **settings) for weight in weights]
    assert_steps_follow(oracles, Lion(weights, lr=1.0, **settings), weights, num_steps=20, rtol=rtol)


def plain_step(weight, mean, grad, *, lr, betas, weight_decay):
    """The same as one expression for each line of the paper, in the kernels' order of operations."""
    update = torch.lerp(mean, grad, 1 - betas[0]).sign_()
    torch._fused_sgd_([mean], [-grad], [], lr=1 - betas[1], weight_decay=1.0, **PLAIN)
    torch._fused_sgd_([weight], [update], [], lr=lr, weight_decay=weight_decay, **PLAIN)


PLAIN = {key: value for key, value in PLAIN_SGD.items() if key != "weight_decay"}


@pytest.mark.parametrize("device", DEVICES)
def test_lion_steps_have_the_bits_of_the_plain_operations(device):
    settings = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    weights = random_weights(0, device=device)
    expected, means = clones(weights), [torch.zeros_like(weight) for weight in weights]
    optimizer = Lion(weights, lr=0.1, **settings)
    for seed in range(5):
        set_random_grads(weights, seed=seed)
        for weight in weights:
            weight.grad.view(-1)[::3] = 0.0  # of the first step: a sign of 0
        for weight, mean, own in zip(expected, means, weights, strict=True):
            plain_step(weight, mean, own.grad.clone(), lr=0.1, **settings)
        optimizer.step()
    assert_same_bits(clones(weights), expected)
    assert_same_bits([optimizer.state[weight]["exp_avg"] for weight in weights], means)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_lion_keeps_what_is_not_finite(value, device):
    """The sign of NaN is 0 in torch: weights would stand still for the rest of the run, at a loss that looks normal."""
    weights = random_weights(0, device=device)
    optimizer = Lion(weights, lr=0.1)
    set_random_grads(weights, seed=0)
    weights[0].grad[0, 0, 0, :2] = value
    optimizer.step()
    assert weights[0].isnan().nonzero().tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]
    assert all(weight.isfinite().all() for weight in weights[1:])
