"""Gradients of the real networks, and the row of a step."""

import time

import pytest
import torch

from benchmarks.comm import (
    gradient_sets,
    step,
    turns,
)


def test_gradient_sets_are_the_real_networks() -> None:
    sizes = {
        model: sum(torch.Size(shape).numel() * 4 for shape in gradient_sets.parameter_shapes(model).values())
        for model in ("resnet50", "alexnet_bn")
    }
    assert sizes["resnet50"] == 4 * 25_557_032  # torchvision's count
    assert sizes["alexnet_bn"] == pytest.approx(244e6, rel=0.01)


def test_gradient_sets_come_in_reverse_order_with_known_values() -> None:
    shapes = {"a.weight": (3, 2), "b": (), "c.bias": (5,), "d": (2, 2, 1, 1)}
    model = gradient_sets.CostlessModel(gradient_sets.make_values(shapes), weight=7)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    model(gradient_sets.start()).backward()
    assert order == ["d", "c-bias", "b", "a-weight"]
    for parameter, value in zip(model.parameters(), (7, 14, 21, 7), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert bool((parameter.grad == value).all())
    assert gradient_sets.count_wrong(model.parameters(), expected=7) == 0
    list(model.parameters())[2].grad[-1] = 0  # type: ignore[index]
    assert gradient_sets.count_wrong(model.parameters(), expected=7) == 1


def test_backward_with_a_pace_takes_its_time() -> None:
    ready = [0.06, 0.04, 0.02]
    pace = gradient_sets.Pace(ready)
    model = gradient_sets.CostlessModel(gradient_sets.make_values(dict.fromkeys("abc", (2,))), weight=1, pace=pace)
    found: list[float] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: found.append(time.perf_counter()))
    loss = model(gradient_sets.start())
    begin = time.perf_counter()
    pace.begin()
    loss.backward()
    assert all(moment - begin >= wanted for moment, wanted in zip(found, reversed(ready), strict=True))


def test_steps_row() -> None:
    # forward ends at 1; gradients of 0.5 MB ready at 2 and 3; end at 5: exposed 2, of which 1.5 MB/s allow ...
    repetitions = [turns.Repetition((1.0, 3.0, 2.0, 5.0), 1.0, (1, 1))] * 2
    row = step.describe_step(
        "ours", repetitions, num_bytes=[500_000, 500_000], num_nodes=4, goodput=[4e6, 4e6]
    )  # 0.5 MB/s: 3 s for all from 2 on, so not before 5; or 1.5 s for the last from 3 on
    assert row["backward_seconds"]["median"] == 2
    assert row["exposed_seconds"]["median"] == 2
    assert row["limit_exposed_seconds"]["median"] == pytest.approx(2)
    assert row["exposed_over_limit"]["median"] == pytest.approx(1)
    assert row["bytes_seconds"] == pytest.approx(3)
    local = step.describe_step("local", repetitions, num_bytes=[500_000] * 2, num_nodes=4, goodput=[4e6])
    assert "exposed_over_limit" not in local
