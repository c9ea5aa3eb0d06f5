"""The moving average of the weights: a closed form, torch's own, what an evaluation sees, and an exact resume."""

import contextlib
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from small_run import ACCUMULATION, PLAN, Recorder, make_batches, make_parts, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bigbatch.errors import DataError
from bigbatch.trainer.checkpoint.weights import evaluated_weights
from bigbatch.trainer.step.ema import MovingAverage
from bigbatch.trainer.step.plan import Parts

NO, YES = torch.tensor([False]), torch.tensor([True])
DECAY = 0.75


def make_average(
    tensors: dict[str, torch.Tensor], *, every_steps: int = 1, decay: float = DECAY
) -> tuple[MovingAverage, list[str]]:
    """And what happened."""
    events: list[str] = []
    average = MovingAverage(
        tensors, decay=decay, every_steps=every_steps, on_change=lambda: events.append("weights were exchanged")
    )
    return average, events


def test_average_is_the_closed_form() -> None:
    """From the first weights on, average = d * average + (1 - d) * weights, with d = min(0.75, (1 + n) / (10 + n))."""
    weights = torch.tensor([100.0, -5.0])
    average, _ = make_average({"w": weights}, every_steps=2)
    seen = []
    for done in range(1, 9):
        weights.copy_(torch.tensor([64.0 * done, -64.0]))
        average.update_(done, skip_1=NO)
        seen.append(average.state_dict(done).get("w", torch.tensor([])).tolist())
    at_2 = Fraction(128)
    at_4 = Fraction(3, 12) * at_2 + Fraction(9, 12) * 256
    at_6 = Fraction(4, 13) * at_4 + Fraction(9, 13) * 384
    at_8 = Fraction(5, 14) * at_6 + Fraction(9, 14) * 512
    assert seen[0] == []
    for found, value in zip(seen[1:], (at_2, at_2, at_4, at_4, at_6, at_6, at_8), strict=True):
        assert found == pytest.approx([float(value), -64.0], rel=1e-6)


def test_average_without_warm_up_has_one_decay_from_its_second_update_on() -> None:
    """The first weights keep the share 0.75^n, as in timm and DDP scripts."""
    weights = torch.tensor([1.0])
    average = MovingAverage({"w": weights}, decay=DECAY, every_steps=1, on_change=lambda: None, warms_up=False)
    for done in range(1, 8):
        average.update_(done, skip_1=NO)
        weights.zero_()
        assert average.state_dict(done)["w"].item() == pytest.approx(DECAY ** (done - 1))


def test_average_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.2), use_buffers=True)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    ours, _ = make_average(tensors, decay=0.2)  # below what it may be from the second step on
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for done in range(1, 12):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().sum().backward()
        optimizer.step()
        ours.update_(done, skip_1=NO)
        theirs.update_parameters(model)
    expected = theirs.module.state_dict()
    assert tensors.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    for name, average in ours.state_dict(11).items():
        assert torch.allclose(average, expected[name], rtol=1e-5, atol=1e-6), name
        assert not torch.allclose(average, model.state_dict()[name], rtol=1e-2), name


@pytest.mark.parametrize("done", [3, 4])
def test_average_stays_as_it_is_in_a_step_that_failed(done: int) -> None:
    weights = torch.randn(9, generator=torch.Generator().manual_seed(0))
    average, _ = make_average({"w": weights})
    average.update_(1, skip_1=NO)
    weights.mul_(3)
    average.update_(2, skip_1=NO)
    before = average.state_dict(2)["w"].clone()
    average.update_(done, skip_1=YES)
    assert torch.equal(average.state_dict(done)["w"], before)
    average.update_(done, skip_1=NO)
    assert not torch.equal(average.state_dict(done)["w"], before)


def test_average_takes_the_place_of_weights_that_come_back_with_their_bits() -> None:
    weights = torch.randn(9, generator=torch.Generator().manual_seed(0))
    average, events = make_average({"w": weights}, every_steps=2)
    with average.in_place_of_weights(1):
        assert events == [], "there is none yet"
    average.update_(2, skip_1=NO)
    averaged = weights.clone()
    weights.mul_(3)
    own = weights.clone()
    with contextlib.suppress(DataError), average.in_place_of_weights(2):
        assert torch.equal(weights, averaged)
        assert events == ["weights were exchanged"]
        raise DataError("an image is gone")
    assert torch.equal(weights, own)
    assert events == ["weights were exchanged"] * 2


def test_average_of_a_run_that_had_none_starts_from_its_weights() -> None:
    weights = torch.ones(3)
    average, _ = make_average({"w": weights})
    weights.fill_(5.0)
    average.load_state_dict({})
    assert average.state_dict(7)["w"].tolist() == [5.0] * 3
    with pytest.raises(ValueError, match="weights"):
        average.load_state_dict({"v": torch.ones(3)})


def test_average_is_evaluated_where_there_is_one() -> None:
    state = {"model": {"w": 1, "norm.num_batches_tracked": 7}}
    assert evaluated_weights(state) == state["model"]
    assert evaluated_weights({**state, "average": {}}) == state["model"]
    assert evaluated_weights({**state, "average": {"w": 2}}) == {"w": 2, "norm.num_batches_tracked": 7}


def with_average(precision: str) -> Parts:
    parts = make_parts(precision=precision)
    tensors = {name: t for name, t in parts.precision.model_state().items() if t.is_floating_point()}
    average = MovingAverage(tensors, decay=DECAY, every_steps=2, on_change=parts.precision.write_half_)
    return replace(parts, average=average)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_average_of_the_loop_stops_at_a_failed_input(precision: str) -> None:
    """The last of five steps has no image: the average is that after four, and an evaluation has its numbers."""

    def batches(count: int):
        yield from make_batches(count * ACCUMULATION)
        raise DataError("the images are gone")

    plan = replace(PLAN, num_steps=6, log_every_steps=6, eval_every_steps=6)
    ended, whole = with_average(precision), with_average(precision)
    with pytest.raises(DataError):
        train(plan, ended, Recorder(), batches(5))
    train(replace(plan, num_steps=5), whole, Recorder(), iter(make_batches(5 * ACCUMULATION)))
    for name, average in whole.average.state_dict(5).items():
        assert torch.equal(ended.average.state_dict(5)[name], average), name
    own = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    with whole.average.in_place_of_weights(5):
        for name, tensor in whole.model.state_dict().items():
            if name in whole.average.state_dict(5):
                assert torch.equal(tensor, whole.average.state_dict(5)[name].to(tensor.dtype)), name
    assert all(torch.equal(own[name], tensor) for name, tensor in whole.model.state_dict().items())
