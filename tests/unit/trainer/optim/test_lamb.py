"""LAMB against a float64 oracle written from its formula; test_fused.py has what it promises like the others."""

import math

import numpy as np
import pytest
import torch
from optimizer_steps import DEVICES, assert_steps_follow, random_weights

from bigbatch.trainer.optim import lamb
from bigbatch.trainer.optim.fused import scaled, scaled_on_gpu
from bigbatch.trainer.optim.lamb import LAMB

torch.set_num_threads(1)


class Oracle:
    """LAMB on one tensor in float64, line by line from algorithm 2 of the paper."""

    def __init__(self, weight, *, betas, eps, weight_decay, adapt):
        self.weight = np.array(weight, np.float64)
        self.m, self.v, self.t = np.zeros_like(self.weight), np.zeros_like(self.weight), 0
        (self.beta1, self.beta2), self.eps, self.weight_decay, self.adapt = betas, eps, weight_decay, adapt

    def step(self, grad, lr):
        grad = np.array(grad, np.float64)
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * grad
        self.v = self.beta2 * self.v + (1 - self.beta2) * grad**2
        direction = (self.m / (1 - self.beta1**self.t)) / (np.sqrt(self.v / (1 - self.beta2**self.t)) + self.eps)
        update = direction + self.weight_decay * self.weight
        weight_norm, update_norm = math.sqrt((self.weight**2).sum()), math.sqrt((update**2).sum())
        ratio = weight_norm / update_norm if self.adapt and weight_norm > 0 and update_norm > 0 else 1.0
        self.weight = self.weight - lr * ratio * update


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-4), (torch.float64, 2e-11)])
@pytest.mark.parametrize(
    "settings",
    [
        {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01},
        {"betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.5},
    ],
)
@pytest.mark.parametrize("way", [scaled, scaled_on_gpu])
def test_lamb_steps_follow_the_formula(settings, dtype, rtol, device, way, monkeypatch):
    monkeypatch.setattr(lamb, "scaled", way)
    adapted = random_weights(0, dtype=dtype, device=device)
    excluded = random_weights(1, dtype=dtype, device=device)
    with torch.no_grad():
        adapted[0].zero_()  # zero weight: ratio 1, then it moves away
    groups = [{"params": adapted, "adapt": True}, {"params": excluded, "adapt": False, "weight_decay": 0.0}]
    optimizer = LAMB(groups, lr=1.0, **settings)
    oracles = [Oracle(w.tolist(), adapt=True, **settings) for w in adapted]
    oracles += [Oracle(w.tolist(), adapt=False, **(settings | {"weight_decay": 0.0})) for w in excluded]
    # zero gradient: weight decay alone, or no update at all
    assert_steps_follow(
        oracles, optimizer, adapted + excluded, num_steps=20, rtol=rtol, change_grads=lambda: adapted[1].grad.zero_()
    )
