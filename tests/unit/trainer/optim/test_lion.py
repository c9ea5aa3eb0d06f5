"""Lion against a float64 oracle written from the paper; test_fused.py has what it promises like the others."""

import numpy as np
import pytest
import torch
from optimizer_steps import DEVICES, assert_steps_follow, random_weights

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
