"""The loss scale against torch's own, its bounds, its state, and the end of a run that it cannot help."""

import pytest
import torch
from error_texts import naming
from torch import nn

from bigbatch.errors import TrainingDiverged
from bigbatch.trainer.config.optimizer import LARGEST_SCALE, SMALLEST_SCALE
from bigbatch.trainer.step.loss_scale import MAX_OVERFLOWS_IN_A_ROW, LossScale, Scaling
from bigbatch.trainer.step.precision import Precision

CPU = torch.device("cpu")
FINITE, INFINITE, NAN = (torch.tensor(value) for value in (3.5, float("inf"), float("nan")))
NO, YES = torch.tensor(False), torch.tensor(True)


def make_scale(initial: float = 2.0**16, growth_steps: int | None = 3) -> LossScale:
    return LossScale(Scaling(initial=initial, growth_steps=growth_steps), device=CPU)


def run(scale: LossScale, overflows: list[bool]) -> list[float]:
    """The scale after each step."""
    return [step(scale, INFINITE if overflow else FINITE) for overflow in overflows]


def step(scale: LossScale, norm: torch.Tensor) -> float:
    assert bool(scale.judge_(norm, failed=NO)) is not bool(norm.isfinite())
    return float(scale.state.scale)


def torch_scales(overflows: list[bool], *, growth_steps: int) -> list[float]:
    """What torch.amp.GradScaler makes of the same steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=growth_steps)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for overflow in overflows:
        scaler.scale(torch.ones(1))
        weight.grad = torch.full((1,), float("inf") if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("growth_steps", [1, 2, 5])
def test_loss_scale_that_is_dynamic_is_that_of_torch(growth_steps: int) -> None:
    drawn = (torch.rand(60, generator=torch.Generator().manual_seed(growth_steps)) < 1 / (growth_steps + 1)).tolist()
    expected = torch_scales(drawn, growth_steps=growth_steps)
    assert max(expected) <= LARGEST_SCALE, "torch knows no bounds"
    assert min(expected) >= SMALLEST_SCALE
    assert len(set(expected)) > 3
    scale = make_scale(2.0**12, growth_steps=growth_steps)
    assert run(scale, drawn) == expected
    assert scale.figures()["overflow_steps"] == sum(drawn)


def test_loss_scale_that_is_dynamic_stays_within_its_bounds() -> None:
    assert run(make_scale(LARGEST_SCALE / 2, growth_steps=1), [False] * 3) == [LARGEST_SCALE] * 3
    assert run(make_scale(2 * SMALLEST_SCALE), [True] * 3) == [SMALLEST_SCALE] * 3
    assert step(make_scale(), NAN) == 2.0**15


def test_loss_scale_that_is_static_stays() -> None:
    scale = make_scale(8.0, growth_steps=None)
    assert run(scale, [False] * 5 + [True] * 5) == [8.0] * 10
    assert scale.figures() == {"loss_scale": 8.0, "overflow_steps": 5}


@pytest.mark.parametrize("norm", [FINITE, INFINITE, NAN])
def test_loss_scale_knows_nothing_of_a_step_that_failed(norm: torch.Tensor) -> None:
    scale = make_scale()
    run(scale, [True, False, False])
    before = scale.state_dict()
    assert scale.judge_(norm, failed=YES)
    assert scale.state_dict() == before


def test_loss_scale_goes_on_where_it_was() -> None:
    overflows = [False, False, True, False, False, False, True, True, False]
    expected = run(make_scale(), overflows)
    for at in range(len(overflows)):
        first, second = make_scale(), make_scale(initial=2.0)
        run(first, overflows[:at])
        second.load_state_dict(first.state_dict())
        assert run(second, overflows[at:]) == expected[at:]
        assert second.figures()["overflow_steps"] == sum(overflows)


def test_loss_scale_that_is_static_is_the_configs_in_a_resumed_run() -> None:
    before, after = make_scale(), make_scale(8.0, growth_steps=None)
    run(before, [True, True])
    after.load_state_dict(before.state_dict())
    assert after.figures() == {"loss_scale": 8.0, "overflow_steps": 2}


def test_loss_scale_takes_no_state_of_another_precision() -> None:
    scale = make_scale()
    scale.load_state_dict({})
    Precision(nn.Linear(1, 1), name="fp32", device=CPU).load_state_dict(scale.state_dict())
    assert scale.figures()["loss_scale"] == 2.0**16
    with pytest.raises(ValueError, match=naming("_growth_tracker", "backoff_factor")):
        scale.load_state_dict(torch.amp.GradScaler("cpu").state_dict())


@pytest.mark.parametrize(
    ("initial", "growth_steps", "named"),
    [
        (2.0**16, 2000, ("loss scale of 1 ",)),
        (LARGEST_SCALE, 2000, ("loss scale of 1 ",)),
        (128.0, None, ("loss scale of 128 ", "optimizer.loss_scale below 128")),
    ],
)
def test_loss_scale_that_overflows_without_end_ends_the_run(
    initial: float, growth_steps: int | None, named: tuple[str, ...]
) -> None:
    scale = make_scale(initial, growth_steps)
    run(scale, [False, True, False] + [True] * (MAX_OVERFLOWS_IN_A_ROW - 1))
    scale.require_progress(3 + MAX_OVERFLOWS_IN_A_ROW - 1, is_last=True)
    run(scale, [True])
    with pytest.raises(TrainingDiverged, match=naming("steps from 4 to 35 ", "schedule.base_lr", *named)):
        scale.require_progress(3 + MAX_OVERFLOWS_IN_A_ROW, is_last=False)
    run(scale, [False])
    scale.require_progress(36, is_last=False)


def test_loss_scale_without_a_single_update_ends_a_short_run() -> None:
    scale = make_scale()
    run(scale, [True] * 3)
    scale.require_progress(3, is_last=False)
    with pytest.raises(TrainingDiverged, match=naming("steps from 1 to 3 ", "loss scale of 8192 ")):
        scale.require_progress(3, is_last=True)
