"""LARS against a float64 oracle written from its formula; test_fused.py has what it promises like the others."""

import pytest
import torch
from optimizer_steps import DEVICES, assert_steps_follow, clones, random_weights, set_random_grads

from benchmarks.largebatch.lars_oracle import Oracle
from bigbatch.trainer.optim import lars
from bigbatch.trainer.optim.fused import scaled_on_gpu
from bigbatch.trainer.optim.lars import LARS

torch.set_num_threads(1)

FORMS = ("lr_inside", "lr_outside")


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
