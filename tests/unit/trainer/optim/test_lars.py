"""LARS against a float64 oracle written from its formula, torch's SGD, and its promises to torch.amp."""

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

from benchmarks.largebatch.oracle import Oracle
from bigbatch.trainer.optim import lars
from bigbatch.trainer.optim.lars import LARS, trust_ratios

torch.set_num_threads(1)

FORMS = ("lr_inside", "lr_outside")


@pytest.fixture(params=["whole tensors", "pieces of 5", "at once, as on a GPU"])
def way(request, monkeypatch):
    """The ways to one and the same update."""
    if request.param == "pieces of 5":
        monkeypatch.setattr(lars, "_CPU_PORTION", 5)
    if request.param == "at once, as on a GPU":
        monkeypatch.setattr(LARS, "_update_on_cpu_", LARS._update_at_once_)
    return request.param


def momenta(optimizer):
    return clones(state["momentum_buffer"] for state in optimizer.state.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "weight_decay": 5e-5, "eps": 0.0, "nesterov": False},
        {"momentum": 0.9, "weight_decay": 5e-5, "eps": 0.0, "nesterov": True},
        {"momentum": 0.95, "weight_decay": 0.1, "eps": 0.01, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.0, "eps": 0.5, "nesterov": False},
        {"momentum": 0.0, "weight_decay": 0.1, "eps": 0.0, "nesterov": False},
    ],
)
def test_two_hundred_steps_follow_the_formula(settings, form, dtype, rtol, device, way):
    adapted = random_weights(0, dtype=dtype, device=device)
    excluded = random_weights(1, dtype=dtype, device=device)
    with torch.no_grad():
        adapted[0].zero_()  # zero weight: ratio 1, then it moves away
        adapted[2].mul_(1e15)  # its gradient too
        adapted[3].mul_(1e-15)
    groups = [{"params": adapted}, {"params": excluded, "adapt": False, "weight_decay": 0.0}]
    optimizer = LARS(groups, lr=1.0, momentum_form=form, **settings)
    oracles = [Oracle(w.tolist(), form=form, adapt=True, **settings) for w in adapted]
    without_decay = settings | {"weight_decay": 0.0}
    oracles += [Oracle(w.tolist(), form=form, adapt=False, **without_decay) for w in excluded]
    lrs = np.random.default_rng(0).uniform(0.0, 1.0, 200)
    for seed, lr in enumerate(lrs):
        set_random_grads(adapted + excluded, seed=seed)
        adapted[1].grad.zero_()  # zero gradient: ratio 1, weight decay still acts
        adapted[2].grad.mul_(1e15)
        adapted[3].grad.mul_(1e-15)
        for group in optimizer.param_groups:
            group["lr"] = float(lr)
        for oracle, weight in zip(oracles, adapted + excluded, strict=True):
            oracle.step(weight.grad.tolist(), lr)
        optimizer.step()
    for oracle, weight in zip(oracles, adapted + excluded, strict=True):
        expected = torch.tensor(oracle.weight, dtype=dtype)
        atol = rtol * float(expected.abs().max())
        torch.testing.assert_close(weight.detach().cpu(), expected, rtol=rtol, atol=atol)


def test_trust_ratio_by_hand():
    weights = [torch.tensor([3.0, 4.0]), torch.zeros(2), torch.tensor([1.0, 0.0])]
    grads = [torch.tensor([0.0, 2.0]), torch.ones(2), torch.zeros(2)]
    ratios_N = trust_ratios(weights, grads, weight_decay=0.1, trust_coefficient=0.006, eps=0.5)
    torch.testing.assert_close(ratios_N, torch.tensor([0.006 * 5 / (2 + 0.1 * 5 + 0.5), 1.0, 1.0]))


def run(lrs, **settings):
    weights = random_weights(dtype=torch.float64)
    optimizer = LARS(weights, lr=1.0, weight_decay=1e-4, **settings)
    for seed, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        set_random_grads(weights, seed=seed)
        optimizer.step()
    return clones(weights)


@pytest.mark.parametrize("nesterov", [False, True])
def test_forms_agree_at_constant_lr_and_differ_under_warmup(nesterov):
    constant, warmup = [5.0] * 20, [5.0 * (s + 1) / 20 for s in range(20)]
    inside, outside = (run(constant, momentum_form=form, nesterov=nesterov) for form in FORMS)
    torch.testing.assert_close(inside, outside, rtol=1e-12, atol=1e-14)
    inside, outside = (run(warmup, momentum_form=form, nesterov=nesterov) for form in FORMS)
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("form", FORMS)
def test_without_adaptation_it_is_sgd(form, momentum, nesterov):
    ours, theirs = random_weights(dtype=torch.float64), random_weights(dtype=torch.float64)
    shared = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.01, "nesterov": nesterov}
    optimizers = LARS(ours, adapt=False, momentum_form=form, **shared), torch.optim.SGD(theirs, **shared)
    for seed in range(20):
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            if form == "lr_outside":  # SGD's own form: equal under any change of lr
                optimizer.param_groups[0]["lr"] = 0.1 * (seed + 1)
            set_random_grads(weights, seed=seed)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_state_dict_resumes_bit_for_bit():
    settings = {"weight_decay": 1e-4, "momentum_form": "lr_outside", "nesterov": True}
    assert_state_dict_resumes(partial(LARS, lr=3.0, **settings), resumed_as=partial(LARS, lr=1.0), states=momenta)


def test_added_group_equals_a_group_from_the_start():
    early, late = random_weights(), random_weights()
    from_start = LARS([{"params": early[:2]}, {"params": early[2:], "adapt": False}], lr=2.0)
    added = LARS(late[:2], lr=2.0)
    added.add_param_group({"params": late[2:], "adapt": False})
    for weights, optimizer in ((early, from_start), (late, added)):
        set_random_grads(weights, seed=0)
        optimizer.step()
    assert_same_bits(late, early)


def test_parameters_without_gradient_stay():
    weights = random_weights()
    before = clones(weights)
    set_random_grads(weights[:2], seed=0)
    optimizer = LARS(weights, lr=2.0, weight_decay=0.1)
    optimizer.step()
    assert_same_bits(clones(weights[2:]), before[2:])
    assert not torch.equal(weights[0], before[0])
    assert len(optimizer.state) == 2


def test_torch_scheduler_sets_the_rate():
    weights = random_weights(dtype=torch.float64)
    optimizer = LARS(weights, lr=4.0, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    for seed in range(9):
        set_random_grads(weights, seed=seed)
        optimizer.step()
        scheduler.step()
    assert_same_bits(clones(weights), run([4.0] * 3 + [2.0] * 3 + [1.0] * 3))


def test_closure_runs_with_gradients_on_and_its_loss_returns():
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    optimizer = LARS([weight], lr=1.0, trust_coefficient=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum() / 2
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 12.5
    torch.testing.assert_close(weight.detach(), torch.tensor([2.7, 3.6]))  # |w| = |g|: r = 0.1


def test_memory_format_changes_nothing():
    assert_memory_format_changes_nothing(partial(LARS, lr=3.0, weight_decay=1e-4), state_names=("momentum_buffer",))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("form", FORMS)
def test_overflow_leaves_every_bit_and_the_run_goes_on(form, poison, unscale_first, device):
    def start():
        weights = random_weights(device=device)
        groups = [{"params": weights[:3]}, {"params": weights[3:], "adapt": False}]
        return weights, LARS(groups, lr=3.0, weight_decay=0.1, momentum_form=form)

    weights, optimizer = start()
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1000)
    for seed in range(3):
        scaled_step(scaler, optimizer, weights, seed=seed, unscale_first=unscale_first)
    before = clones(weights), momenta(optimizer)
    scaled_step(scaler, optimizer, weights, seed=99, poison=poison, unscale_first=unscale_first)
    assert_same_bits((clones(weights), momenta(optimizer)), before)
    assert scaler.get_scale() == 2.0**9
    scaled_step(scaler, optimizer, weights, seed=3, unscale_first=unscale_first)

    plain_weights, plain = start()
    for seed in range(4):
        set_random_grads(plain_weights, seed=seed)
        plain.step()
    assert_same_bits(clones(weights), clones(plain_weights))  # powers of two scale without rounding


def test_overflow_in_the_first_step():
    weights = random_weights()
    before = clones(weights)
    optimizer = LARS(weights, lr=3.0)
    scaled_step(torch.amp.GradScaler("cpu"), optimizer, weights, seed=0, poison=math.inf)
    assert_same_bits(clones(weights), before)
    assert all(not buffer.any() for buffer in momenta(optimizer))


def test_overflow_counted_on_two_devices_skips():
    weights = random_weights()
    before = clones(weights)
    set_random_grads(weights, seed=0)
    optimizer = LARS(weights, lr=3.0)
    optimizer.found_inf = torch.tensor(2.0)
    optimizer.step()
    assert_same_bits(clones(weights), before)


@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_step_neither_syncs_nor_grows_with_the_number_of_tensors(form, monkeypatch):
    monkeypatch.setattr(LARS, "_update_on_cpu_", LARS._update_at_once_)

    def ops(num_tensors):
        weights = [torch.randn(3, 2).requires_grad_() for _ in range(num_tensors)]
        optimizer = LARS(weights, lr=1.0, weight_decay=0.1, momentum_form=form)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        for _ in range(2):  # the first step also makes the buffers
            set_random_grads(weights, seed=0)
            with OpNames() as seen:
                optimizer.step()
        return [name for name in seen.names if name != "detach"]

    assert ops(2) == ops(30)
    assert not {"_local_scalar_dense", "is_nonzero", "equal"} & set(ops(2))
    assert {"_foreach_norm", "_fused_sgd_"} <= set(ops(2))


@pytest.mark.parametrize("key", ["lr", "momentum", "weight_decay", "trust_coefficient", "eps"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, None, torch.tensor(1.0)])
def test_refuses_a_setting_that_is_no_finite_number_of_at_least_zero(key, value):
    with pytest.raises(ValueError, match=f"^{key} must be"):
        LARS(random_weights(), **({"lr": 1.0} | {key: value}))


def test_refuses_an_unknown_momentum_form():
    with pytest.raises(ValueError, match="lr_inside, lr_outside, not 'heavy_ball'"):
        LARS(random_weights(), lr=1.0, momentum_form="heavy_ball")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_refuses_half_precision_parameters(dtype):
    with pytest.raises(ValueError, match="fp32 master weights"):
        LARS(random_weights(dtype=dtype), lr=1.0)


def test_refuses_parameters_with_gaps():
    with pytest.raises(ValueError, match="contiguous"):
        LARS([torch.zeros(4, 6)[:, ::2].requires_grad_()], lr=1.0)


def test_refuses_sparse_gradients():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients"):
        LARS(embedding.parameters(), lr=1.0).step()


def test_a_refused_group_is_not_added():
    optimizer = LARS(random_weights(), lr=1.0)
    with pytest.raises(ValueError, match="weight_decay"):
        optimizer.add_param_group({"params": random_weights(), "weight_decay": -1.0})
    assert len(optimizer.param_groups) == 1


def test_a_cpu_takes_small_tensors_together_and_large_ones_in_pieces(monkeypatch):
    monkeypatch.setattr(lars, "_CPU_PORTION", 10)
    weights = [torch.zeros(n) for n in (4, 6, 1, 25, 10, 11)]
    assert [[w.numel() for w in some] for some in lars._portions(weights)] == [[4, 6], [1], [25], [10], [11]]
    strided = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    pieces = [piece for piece, _ in lars._pieces([strided, strided])]
    assert [p.numel() for p in pieces] == [10, 10, 4]
    assert torch.equal(torch.cat(pieces), strided.permute(0, 2, 3, 1).flatten())  # as memory lies
    assert pieces[0].data_ptr() == strided.data_ptr()
