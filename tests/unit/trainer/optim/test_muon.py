"""Muon against a float64 oracle written from its formula, torch's own, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from error_texts import naming
from optimizer_steps import DEVICES, assert_steps_follow, groups_of, random_weights, set_random_grads

import bigbatch
from bigbatch.trainer.optim.muon import Muon

torch.set_num_threads(1)


class Oracle:
    """Muon on one tensor in float64: the polynomial is applied to singular values, where the class multiplies."""

    def __init__(self, weight, *, momentum, nesterov, weight_decay, steps):
        self.weight = np.array(weight, np.float64)
        self.v = np.zeros_like(self.weight)
        self.momentum, self.nesterov, self.weight_decay, self.steps = momentum, nesterov, weight_decay, steps

    def step(self, grad, lr):
        grad = np.array(grad, np.float64)
        if self.weight.ndim < 2:
            grad = grad + self.weight_decay * self.weight
        self.v = self.momentum * self.v + grad
        update = grad + self.momentum * self.v if self.nesterov else self.v
        if self.weight.ndim < 2:
            self.weight = self.weight - lr * update
            return
        matrix = update.reshape(len(update), -1)
        u, s, vh = np.linalg.svd(matrix, full_matrices=False)
        s = s / max(math.sqrt((s**2).sum()), 1e-7)
        for _ in range(self.steps):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        rows, columns = matrix.shape
        update = math.sqrt(max(1, rows / columns)) * (u * s @ vh).reshape(self.weight.shape)
        self.weight = self.weight - lr * self.weight_decay * self.weight - lr * update


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 5e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.95, "nesterov": True, "weight_decay": 0.01, "steps": 5},
        {"momentum": 0.6, "nesterov": False, "weight_decay": 0.1, "steps": 3},
        {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "steps": 5},
    ],
)
def test_muon_steps_follow_the_formula(settings, dtype, rtol, device):
    """Twenty of them; gradients come from outside, so that rounding adds up and does not grow."""
    weights = random_weights(dtype=dtype, device=device)
    oracles = [Oracle(w.tolist(), **settings) for w in weights]
    own = {key: value for key, value in settings.items() if key != "steps"}
    optimizer = Muon(groups_of(weights), lr=1.0, newton_schulz_steps=settings["steps"], **own)
    assert_steps_follow(oracles, optimizer, weights, num_steps=20, rtol=rtol)


def test_muon_in_bf16_is_torchs_of_matrices():
    """torch's rounds before it takes the norm, and keeps a mean as momentum: the same direction."""
    ours, theirs = (
        [torch.randn(s, generator=torch.Generator().manual_seed(1)).requires_grad_() for s in ((8, 6), (5, 9))]
        for _ in range(2)
    )
    shared = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    both = ((ours, Muon(ours, newton_schulz_precision="bf16", **shared)), (theirs, torch.optim.Muon(theirs, **shared)))
    start = [w.detach().clone() for w in ours]
    for weights, optimizer in both:
        for seed in range(5):
            set_random_grads(weights, seed=seed)
            optimizer.step()
    for our, their, first in zip(ours, theirs, start, strict=True):
        way = float((their - first).detach().norm())
        assert float((our - their).detach().norm()) < 0.03 * way
        assert way > 0.1


def test_muon_on_a_vector_is_refused_by_name():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    names = ["0.weight", "1.weight"]
    group = {"params": [model.get_parameter(name) for name in names], "names": names}
    with pytest.raises(ValueError, match=naming("Muon ", " 1.weight ", "(2,)", "adapt=False", "bigbatch.param_groups")):
        Muon([group], lr=0.1)
    with pytest.raises(ValueError, match=naming("Muon ", "parameter 1 of the group ", "()")):
        Muon([torch.ones(2, 2, requires_grad=True), torch.ones((), requires_grad=True)], lr=0.1)
    groups = bigbatch.param_groups(model, weight_decay=0.1)  # the second does not adapt
    assert isinstance(Muon(groups, lr=0.1), Muon)
