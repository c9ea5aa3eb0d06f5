"""LAMB against a float64 oracle written from its formula, timm's, torch's AdamW, and its promises to torch.amp."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from optimizer_steps import (
    DEVICES,
    OpNames,
    assert_memory_format_changes_nothing,
    assert_same_bits,
    assert_state_dict_resumes,
    clones,
    random_weights,
    scaled_step,
    set_random_grads,
)
from timm.optim import Lamb as TimmLamb

import bigbatch
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


def states(optimizer):
    return clones(value for state in optimizer.state.values() for value in state.values())


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
def test_two_hundred_steps_follow_the_formula(settings, dtype, rtol, device):
    adapted = random_weights(0, dtype=dtype, device=device)
    excluded = random_weights(1, dtype=dtype, device=device)
    with torch.no_grad():
        adapted[0].zero_()  # zero weight: ratio 1, then it moves away
    groups = [{"params": adapted}, {"params": excluded, "adapt": False, "weight_decay": 0.0}]
    optimizer = LAMB(groups, lr=1.0, **settings)
    oracles = [Oracle(w.tolist(), adapt=True, **settings) for w in adapted]
    oracles += [Oracle(w.tolist(), adapt=False, **(settings | {"weight_decay": 0.0})) for w in excluded]
    for seed, lr in enumerate(np.random.default_rng(0).uniform(0.0, 0.05, 200)):
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


def test_it_is_timms_without_clipping():
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


def test_without_adaptation_it_is_adamw():
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


def test_state_dict_resumes_bit_for_bit():
    assert_state_dict_resumes(
        partial(LAMB, lr=0.1, betas=(0.8, 0.9), weight_decay=0.01), resumed_as=partial(LAMB, lr=1.0), states=states
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("first", [0, 3])
def test_overflow_leaves_every_bit_and_the_run_goes_on(first, poison, unscale_first, device):
    def start():
        weights = random_weights(device=device)
        groups = [{"params": weights[:3]}, {"params": weights[3:], "adapt": False}]
        return weights, LAMB(groups, lr=0.1, weight_decay=0.1)

    weights, optimizer = start()
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1000)
    for seed in range(first):
        scaled_step(scaler, optimizer, weights, seed=seed, unscale_first=unscale_first)
    before = clones(weights), states(optimizer)
    scaled_step(scaler, optimizer, weights, seed=99, poison=poison, unscale_first=unscale_first)
    assert_same_bits(clones(weights), before[0])
    if first:
        assert_same_bits(states(optimizer), before[1])
    assert all(not state.any() for state in states(optimizer)) == (first == 0)
    assert scaler.get_scale() == 2.0**9
    for seed in range(first, first + 3):
        scaled_step(scaler, optimizer, weights, seed=seed, unscale_first=unscale_first)

    plain_weights, plain = start()
    for seed in range(first + 3):
        set_random_grads(plain_weights, seed=seed)
        plain.step()
    assert_same_bits(clones(weights), clones(plain_weights))  # powers of two scale without rounding
    assert_same_bits(states(optimizer), states(plain))


def test_overflow_counted_on_two_devices_skips():
    weights = random_weights()
    before = clones(weights)
    set_random_grads(weights, seed=0)
    optimizer = LAMB(weights, lr=3.0)
    optimizer.found_inf = torch.tensor(2.0)
    optimizer.step()
    assert_same_bits(clones(weights), before)
    assert all(not state.any() for state in states(optimizer))


def test_memory_format_changes_nothing():
    assert_memory_format_changes_nothing(
        partial(LAMB, lr=0.1, weight_decay=1e-4), state_names=("exp_avg", "exp_avg_sq")
    )


def test_parameters_without_gradient_stay_and_count_no_step():
    weights = random_weights()
    before = clones(weights)
    set_random_grads(weights[:2], seed=0)
    optimizer = LAMB(weights, lr=0.1, weight_decay=0.1)
    optimizer.step()
    assert_same_bits(clones(weights[2:]), before[2:])
    assert not torch.equal(weights[0], before[0])
    assert len(optimizer.state) == 2


def test_closure_runs_with_gradients_on_and_its_loss_returns():
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    optimizer = LAMB([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum() / 2
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 12.5
    # u = (1, 1) nearly, |w| / |u| = 5 / sqrt(2)
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0]) - 0.5 / math.sqrt(2), rtol=0, atol=1e-5)


def test_step_neither_syncs_nor_grows_with_the_number_of_tensors():
    def ops(num_tensors):
        weights = [torch.randn(3, 2).requires_grad_() for _ in range(num_tensors)]
        optimizer = LAMB(weights, lr=1.0, weight_decay=0.1)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        for _ in range(2):  # the first step also makes the moments
            set_random_grads(weights, seed=0)
            with OpNames() as seen:
                optimizer.step()
        return [name for name in seen.names if name not in ("detach", "zeros_like")]

    assert ops(2) == ops(30)
    assert not {"_local_scalar_dense", "is_nonzero", "equal"} & set(ops(2))
    assert {"_foreach_norm", "_fused_adam_", "_fused_sgd_"} <= set(ops(2))


@pytest.mark.parametrize("key", ["lr", "weight_decay", "eps"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, None])
def test_refuses_a_setting_that_is_no_finite_number_of_at_least_zero(key, value):
    with pytest.raises(ValueError, match=f"^{key} must be a finite number of at least 0"):
        LAMB(random_weights(), **({"lr": 1.0} | {key: value}))


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)])
def test_refuses_betas_that_keep_everything(betas):
    with pytest.raises(ValueError, match=r"^betas must be a number of at least 0 and below 1"):
        LAMB(random_weights(), lr=1.0, betas=betas)


def test_refuses_to_divide_by_zero():
    with pytest.raises(ValueError, match=r"^eps must be positive"):
        LAMB(random_weights(), lr=1.0, eps=0.0)


def test_refuses_half_precision_parameters_and_sparse_gradients():
    with pytest.raises(ValueError, match=r"LAMB needs float32.*fp32 master weights"):
        LAMB(random_weights(dtype=torch.float16), lr=1.0)
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="LAMB needs dense gradients"):
        LAMB(embedding.parameters(), lr=1.0).step()


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = LAMB(random_weights(), lr=1.0)
    with pytest.raises(ValueError, match="weight_decay"):
        optimizer.add_param_group({"params": random_weights(1), "weight_decay": -1.0})
    assert len(optimizer.param_groups) == 1


def test_it_is_public():
    assert bigbatch.LAMB is LAMB
