"""LARS against a float64 oracle written from its formula; test_fused.py has what it promises like the others."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_steps import DEVICES, assert_steps_follow, clones, random_weights, set_random_grads

from bigbatch.trainer.optim import lars
from bigbatch.trainer.optim.fused import scaled_on_gpu
from bigbatch.trainer.optim.lars import LARS

torch.set_num_threads(1)

FORMS = ("lr_inside", "lr_outside")


class Oracle:
    """LARS on one tensor in float64, line by line from its formula; shares no code with the tested optimizer.

    Follows You et al. 2017 with the conventions of MLPerf's reference (lr_inside) or NVIDIA's (lr_outside).

    r = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), and 1 without adapt or where |w| or |g| is 0;
    lr_inside:  v = momentum * v + lr * r * (g + weight_decay * w);  w -= v
    lr_outside: v = momentum * v + r * (g + weight_decay * w);       w -= lr * v
    nesterov: v's last summand + momentum * v stands in for v in w's update.
    """

    def __init__(
        self,
        weight: Sequence[Any] | np.ndarray,
        *,
        momentum: float,
        weight_decay: float,
        eps: float,
        form: str,
        adapt: bool,
        nesterov: bool,
        trust_coefficient: float = 0.001,
    ) -> None:
        self.weight, self.buffer = np.array(weight, np.float64), np.zeros_like(weight, np.float64)
        self.momentum, self.weight_decay, self.eps = momentum, weight_decay, eps
        self.form, self.adapt, self.nesterov, self.eta = form, adapt, nesterov, trust_coefficient

    def step(self, grad: Sequence[Any] | np.ndarray, lr: float) -> None:
        """Make one update of weight, in place of the old one."""
        grad = np.array(grad, np.float64)
        weight_norm, grad_norm = math.sqrt((self.weight**2).sum()), math.sqrt((grad**2).sum())
        ratio = 1.0
        if self.adapt and weight_norm > 0 and grad_norm > 0:
            ratio = self.eta * weight_norm / (grad_norm + self.weight_decay * weight_norm + self.eps)
        inner, outer = (lr, 1.0) if self.form == "lr_inside" else (1.0, lr)
        change = inner * ratio * (grad + self.weight_decay * self.weight)
        self.buffer = self.momentum * self.buffer + change
        change = change + self.momentum * self.buffer if self.nesterov else self.buffer
        self.weight = self.weight - outer * change


@pytest.fixture(params=["whole tensors", "pieces of 5", "at once, as on a GPU"])
def way(request, monkeypatch):
    """The ways to one and the same update."""
    if request.param == "pieces of 5":
        monkeypatch.setattr(lars, "_CPU_PORTION", 5)
    if request.param == "at once, as on a GPU":
        monkeypatch.setattr(LARS, "_update_on_cpu_", LARS._update_at_once_)
        monkeypatch.setattr(lars, "scaled", scaled_on_gpu)
    return request.param


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "weight_decay": 5e-5, "eps": 0.0, "nesterov": False},
        {"momentum": 0.95, "weight_decay": 0.1, "eps": 0.01, "nesterov": True},
        {"momentum": 0.0, "weight_decay": 0.1, "eps": 0.0, "nesterov": False},
    ],
)
def test_lars_steps_follow_the_formula(settings, form, dtype, rtol, device, way):
    adapted = random_weights(0, dtype=dtype, device=device)
    excluded = random_weights(1, dtype=dtype, device=device)
    with torch.no_grad():
        adapted[0].zero_()  # zero weight: ratio 1, then it moves away
        adapted[2].mul_(1e15)  # its gradient too
        adapted[3].mul_(1e-15)
    groups = [{"params": adapted, "adapt": True}, {"params": excluded, "adapt": False, "weight_decay": 0.0}]
    optimizer = LARS(groups, lr=1.0, momentum_form=form, **settings)
    oracles = [Oracle(w.tolist(), form=form, adapt=True, **settings) for w in adapted]
    without_decay = settings | {"weight_decay": 0.0}
    oracles += [Oracle(w.tolist(), form=form, adapt=False, **without_decay) for w in excluded]

    def change_grads():
        adapted[1].grad.zero_()  # zero gradient: ratio 1, weight decay still acts
        adapted[2].grad.mul_(1e15)
        adapted[3].grad.mul_(1e-15)

    assert_steps_follow(
        oracles,
        optimizer,
        adapted + excluded,
        num_steps=20,
        rtol=rtol,
        largest_lr=1.0,
        least=0.0,
        change_grads=change_grads,
    )


def run(lrs, **settings):
    weights = random_weights(dtype=torch.float64)
    optimizer = LARS(weights, lr=1.0, weight_decay=1e-4, adapt=True, **settings)
    for seed, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        set_random_grads(weights, seed=seed)
        optimizer.step()
    return clones(weights)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_forms_agree_at_constant_lr_and_differ_under_warmup(nesterov):
    constant, warmup = [5.0] * 20, [5.0 * (s + 1) / 20 for s in range(20)]
    inside, outside = (run(constant, momentum_form=form, nesterov=nesterov) for form in FORMS)
    torch.testing.assert_close(inside, outside, rtol=1e-12, atol=1e-14)
    inside, outside = (run(warmup, momentum_form=form, nesterov=nesterov) for form in FORMS)
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(inside, outside, strict=True))
