"""LAMB against a float64 oracle written from its formula, timm's, torch's AdamW, and its promises to torch.amp."""

import math

import numpy as np
import pytest
import torch
from optimizer_steps import (
    DEVICES,
    random_weights,
    set_random_grads,
)

from bigbatch.trainer.optim import lamb
from bigbatch.trainer.optim.fused import scaled, scaled_on_gpu
from bigbatch.trainer.optim.lamb import LAMB

TimmLamb = pytest.importorskip("timm.optim").Lamb

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
        {"betas": (0.0, 0.9), "eps": 1e-3, "weight_decay": 0.0},
    ],
)
@pytest.mark.parametrize("way", [scaled, scaled_on_gpu])
def test_lamb_fifty_steps_follow_the_formula(settings, dtype, rtol, device, way, monkeypatch):
    monkeypatch.setattr(lamb, "scaled", way)
    adapted = random_weights(0, dtype=dtype, device=device)
    excluded = random_weights(1, dtype=dtype, device=device)
    with torch.no_grad():
        adapted[0].zero_()  # zero weight: ratio 1, then it moves away
    groups = [{"params": adapted}, {"params": excluded, "adapt": False, "weight_decay": 0.0}]
    optimizer = LAMB(groups, lr=1.0, **settings)
    oracles = [Oracle(w.tolist(), adapt=True, **settings) for w in adapted]
    oracles += [Oracle(w.tolist(), adapt=False, **(settings | {"weight_decay": 0.0})) for w in excluded]
    for seed, lr in enumerate(np.random.default_rng(0).uniform(0.0, 0.05, 50)):
        set_random_grads(adapted + excluded, seed=seed)
        adapted[1].grad.zero_()  # zero gradient: weight decay alone, or no update at all
        for group in optimizer.param_groups:
            group["lr"] = float(lr)
        for oracle, weight in zip(oracles, adapted + excluded, strict=True):
            oracle.step(weight.grad.tolist(), float(lr))
        optimizer.step()
    for oracle, weight in zip(oracles, adapted + excluded, strict=True):
        expected = torch.tensor(oracle.weight, dtype=dtype)
        atol = rtol * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(weight.detach().cpu(), expected, rtol=rtol, atol=atol)


def test_lamb_is_timms_without_clipping():
    """timm's does not adapt a group without decay; ours is told so by adapt."""
    ours, theirs = ([random_weights(i, dtype=torch.float64) for i in (0, 1)] for _ in range(2))
    for weights, make, excluded in ((ours, LAMB, {"adapt": False}), (theirs, TimmLamb, {})):
        groups = [{"params": weights[0], "weight_decay": 0.1}, {"params": weights[1], "weight_decay": 0.0, **excluded}]
        clipping = {} if make is LAMB else {"max_grad_norm": None}
        optimizer = make(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-6, **clipping)
        for seed in range(50):
            set_random_grads([*weights[0], *weights[1]], seed=seed)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_lamb_without_adaptation_is_adamw():
    ours, theirs = random_weights(dtype=torch.float64), random_weights(dtype=torch.float64)
    shared = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    for weights, optimizer in (
        (ours, LAMB(ours, adapt=False, **shared)),
        (theirs, torch.optim.AdamW(theirs, **shared)),
    ):
        for seed in range(30):
            set_random_grads(weights, seed=seed)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)])
def test_lamb_refuses_betas_that_keep_everything(betas):
    with pytest.raises(ValueError, match=r"^betas "):
        LAMB(random_weights(), lr=1.0, betas=betas)


def test_lamb_refuses_to_divide_by_zero():
    with pytest.raises(ValueError, match=r"^eps "):
        LAMB(random_weights(), lr=1.0, eps=0.0)
