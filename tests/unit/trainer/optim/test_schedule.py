"""Whole learning-rate series against closed forms in NumPy and against torch's schedulers."""

import numpy as np
import pytest
import torch

from bigbatch.trainer.optim.schedule import cosine, cyclic, mirrored_momentum, one_cycle, polynomial, step_decay


def series(schedule, num_steps):
    return np.array([schedule(step) for step in range(num_steps)])


def torch_series(make_scheduler, num_steps, *, lr):
    """The learning rates that torch's scheduler gives to updates 0, 1, ..."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(rates)


def warmup(base_lr, warmup_steps):
    return base_lr * np.arange(1, warmup_steps + 1) / warmup_steps


def test_polynomial_with_mlperfs_defaults():
    expected = np.concatenate([warmup(24.7, 30), 1e-4 + (24.7 - 1e-4) * (np.arange(69, -1, -1) / 70) ** 2])
    actual = series(polynomial(base_lr=24.7, warmup_steps=30, total_steps=100), 100)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    assert actual.argmax() == 29
    assert actual[29] == 24.7
    assert actual[-1] == 1e-4


def test_polynomial_follows_mlperfs_reference_one_update_later():
    """poly_rate_fn at global_step = s + 1; its decay divides by one more step."""
    base_lr, num_warmup, total, end_lr = 10.0, 50, 1000, 1e-4
    global_steps = np.arange(1, total + 1)
    decay = np.maximum(1, global_steps - num_warmup) / (total - num_warmup + 1)
    reference = np.where(
        global_steps <= num_warmup, base_lr * global_steps / num_warmup, (base_lr - end_lr) * (1 - decay) ** 2 + end_lr
    )
    actual = series(polynomial(base_lr=base_lr, warmup_steps=num_warmup, total_steps=total), total)
    np.testing.assert_allclose(actual[:num_warmup], reference[:num_warmup], rtol=1e-12)
    assert np.abs(actual - reference).max() < 2 * base_lr / (total - num_warmup + 1)


def test_cyclic_is_smiths_triangle():
    """Cycles of 4 steps between 0.1 and 0.5, the second with half the height: triangular2 of arXiv 1506.01186."""
    actual = series(cyclic(base_lr=0.5, cycle_steps=4, end_lr=0.1, cycle_factor=0.5), 12)
    expected = [0.3, 0.5, 0.3, 0.1, 0.2, 0.3, 0.2, 0.1, 0.15, 0.2, 0.15, 0.1]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    assert cyclic(base_lr=0.5, cycle_steps=4, end_lr=0.1)(-5) == pytest.approx(0.3)


def test_momentum_mirrors_the_rate():
    """One cycle from 0.95 to 0.85 and back, in steps of 0.025 up and 0.0125 down; torch's OneCycleLR does so, too."""
    rate = one_cycle(base_lr=0.4, warmup_steps=4, total_steps=12, end_lr=0.0)
    actual = series(mirrored_momentum(rate, base_lr=0.4, high=0.95, low=0.85), 12)
    expected = [0.925, 0.9, 0.875, 0.85, 0.8625, 0.875, 0.8875, 0.9, 0.9125, 0.925, 0.9375, 0.95]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    cycles = cyclic(base_lr=0.5, cycle_steps=4, end_lr=0.1, cycle_factor=0.5)
    mirrored = series(mirrored_momentum(cycles, base_lr=0.5, high=0.9, low=0.5, lowest_lr=0.1), 8)
    np.testing.assert_allclose(mirrored, [0.7, 0.5, 0.7, 0.9, 0.8, 0.7, 0.8, 0.9], rtol=1e-12)


def test_step_decay_series():
    actual = series(step_decay(base_lr=1.0, warmup_steps=2, milestone_steps=[4, 6], gamma=0.1), 9)
    np.testing.assert_allclose(actual, [0.5, 1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01], rtol=1e-12)


def test_schedules_are_those_of_torch():
    """After a warm-up of one step, ours at step s is torch's: both start at base_lr with update 0."""
    schedulers, total = torch.optim.lr_scheduler, 40
    pairs = [
        (
            polynomial(base_lr=3.0, warmup_steps=1, total_steps=total, power=2.0, end_lr=0.0),
            lambda optimizer: schedulers.PolynomialLR(optimizer, total_iters=total - 1, power=2.0),
        ),
        (
            cosine(base_lr=3.0, warmup_steps=1, total_steps=total, end_lr=0.2),
            lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=total - 1, eta_min=0.2),
        ),
        (
            one_cycle(base_lr=3.0, warmup_steps=1, total_steps=total, end_lr=0.3),
            lambda optimizer: schedulers.LinearLR(optimizer, 1.0, 0.1, total_iters=total - 1),
        ),
        (
            step_decay(base_lr=3.0, warmup_steps=0, milestone_steps=[10, 25], gamma=0.2),
            lambda optimizer: schedulers.MultiStepLR(optimizer, [10, 25], gamma=0.2),
        ),
    ]
    for ours, make_scheduler in pairs:
        expected = torch_series(make_scheduler, total, lr=3.0)
        np.testing.assert_allclose(series(ours, total), expected, rtol=1e-9, atol=1e-12)


DECAYING = (polynomial, cosine, one_cycle)


@pytest.mark.parametrize("constructor", DECAYING)
@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (0, 10), (3, 10), (9, 10), (1, 1)])
def test_schedules_end_rise_and_fall(constructor, warmup_steps, total_steps):
    schedule = constructor(base_lr=2.0, warmup_steps=warmup_steps, total_steps=total_steps, end_lr=0.5)
    rates = series(schedule, total_steps)
    assert rates[-1] == pytest.approx(2.0 if warmup_steps == total_steps else 0.5)
    assert (np.diff(rates[:warmup_steps]) > 0).all()
    assert (np.diff(rates[max(warmup_steps - 1, 0) :]) < 0).all()


@pytest.mark.parametrize("constructor", DECAYING)
def test_schedules_outside_the_run_take_its_first_and_last_value(constructor):
    schedule = constructor(base_lr=2.0, warmup_steps=3, total_steps=10, end_lr=0.5)
    assert schedule(10) == schedule(10**9) == schedule(9) == pytest.approx(0.5)
    assert schedule(-1) == schedule(-7) == schedule(0) == pytest.approx(2 / 3)


@pytest.mark.parametrize("wrong", [{"total_steps": 0, "warmup_steps": 0}, {"warmup_steps": 11}])
def test_schedules_that_decay_refuse_steps(wrong):
    settings = {"base_lr": 1.0, "warmup_steps": 2, "total_steps": 10, "end_lr": 0.0}
    with pytest.raises(ValueError, match=r"^total_steps "):
        cosine(**(settings | wrong))


@pytest.mark.parametrize("milestones", [[5, 4], [5, 5], [1, 5]])
def test_step_decay_refuses_milestones_that_do_not_rise_after_the_warm_up(milestones):
    with pytest.raises(ValueError, match=r"^milestones "):
        step_decay(base_lr=1.0, warmup_steps=2, milestone_steps=milestones, gamma=0.1)


@pytest.mark.parametrize(("factor", "mode"), [(1.0, "triangular"), (0.5, "triangular2")])
def test_cyclic_is_torchs_one_update_earlier(factor, mode):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.CyclicLR(
            optimizer, base_lr=0.2, max_lr=2.0, step_size_up=7, mode=mode, cycle_momentum=False
        )

    expected = torch_series(scheduler, 61, lr=0.2)
    actual = series(cyclic(base_lr=2.0, cycle_steps=14, end_lr=0.2, cycle_factor=factor), 60)
    np.testing.assert_allclose(actual, expected[1:], rtol=1e-9)
