"""Lion against a float64 oracle written from the paper, timm's, and its promises to torch.amp."""

import numpy as np
import pytest
import torch
from optimizer_steps import (
    DEVICES,
    assert_memory_format_changes_nothing,
    assert_same_bits,
    assert_state_dict_resumes,
    assert_steps_follow,
    clones,
    random_weights,
    scaled_step,
    set_random_grads,
)

from bigbatch.trainer.optim.lion import Lion

TimmLion = pytest.importorskip("timm.optim").Lion
SETTINGS = {"betas": (0.9, 0.99), "weight_decay": 0.1}

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
@pytest.mark.parametrize("settings", [SETTINGS, {"betas": (0.0, 0.5), "weight_decay": 0.0}])
def test_lion_fifty_steps_follow_the_formula(settings, dtype, rtol, device):
    weights = random_weights(0, dtype=dtype, device=device)
    oracles = [Oracle(weight.tolist(), **settings) for weight in weights]
    assert_steps_follow(oracles, Lion(weights, lr=1.0, **settings), weights, num_steps=50, rtol=rtol)


def test_lion_is_timms():
    ours, theirs = random_weights(dtype=torch.float64), random_weights(dtype=torch.float64)
    for weights, make in ((ours, Lion), (theirs, TimmLion)):
        optimizer = make(weights, lr=0.01, **SETTINGS)
        for seed in range(30):
            set_random_grads(weights, seed=seed)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("device", DEVICES)
def test_lion_an_overflow_changes_nothing(device):
    weights, plain = random_weights(device=device), random_weights(device=device)
    optimizer, reference = Lion(weights, lr=0.1, **SETTINGS), Lion(plain, lr=0.1, **SETTINGS)
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    for seed, poison in ((0, None), (1, float("inf")), (2, float("nan")), (3, None)):
        before = clones([*weights, *(optimizer.state[w]["exp_avg"] for w in weights if optimizer.state[w])])
        scaled_step(scaler, optimizer, weights, seed=seed, poison=poison)
        if poison is not None:
            assert_same_bits([*weights, *(optimizer.state[w]["exp_avg"] for w in weights)], before)
            continue
        set_random_grads(plain, seed=seed)
        reference.step()
    torch.testing.assert_close(clones(weights), clones(plain), rtol=1e-5, atol=1e-6)


def test_lion_first_step_that_overflows_leaves_means_of_zero():
    weights = random_weights()
    optimizer = Lion(weights, lr=0.1)
    scaled_step(torch.amp.GradScaler("cpu"), optimizer, weights, seed=0, poison=float("inf"))
    assert all(not optimizer.state[w]["exp_avg"].any() for w in weights)


def test_lion_resumes_from_its_state_dict():
    assert_state_dict_resumes(
        lambda weights: Lion(weights, lr=0.1, **SETTINGS),
        resumed_as=lambda weights: Lion(weights, lr=0.5, betas=(0.5, 0.5)),
        states=lambda optimizer: [state["exp_avg"] for state in optimizer.state.values()],
    )


def test_lion_takes_any_memory_format():
    assert_memory_format_changes_nothing(lambda weights: Lion(weights, lr=0.1), state_names=("exp_avg",))


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)])
def test_lion_refuses_betas_that_keep_everything(betas):
    with pytest.raises(ValueError, match=r"^betas "):
        Lion(random_weights(), lr=1.0, betas=betas)
