"""Clipping and skipping: against torch's own clipping, with optimizers that skip by themselves and such that do not."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.step.loss_scale import Scaling
from bigbatch.trainer.step.precision import Precision, step_or_skip_

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused sgd": partial(torch.optim.SGD, lr=0.1, fused=True),
    "fused adamw": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "lars": partial(LARS, lr=1.0),
    "plain sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=False),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1),
}


def make_weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (7,), (2, 2, 3))]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    return weights


def grads_of(weights: list[nn.Parameter]) -> list[torch.Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("divisor", [None, 8.0])
def test_guard_steps_as_with_divided_gradients(name: str, divisor: float | None) -> None:
    ours, theirs = make_weights(), make_weights()
    for weight in ours:
        weight.grad = grads_of([weight])[0] * (divisor or 1.0)
    scale = None if divisor is None else torch.tensor(divisor)
    step_or_skip_(OPTIMIZERS[name](ours), ours, divisor=scale, skip=torch.tensor(False))
    OPTIMIZERS[name](theirs).step()
    for weight, expected in zip(ours, theirs, strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("clip_norm", [1e-3, 1e9])
@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_guard_clips_the_unscaled_gradients(name: str, clip_norm: float) -> None:
    """A plain step of torch in fp32, on gradients that torch clipped."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    plain = copy.deepcopy(model)
    images = torch.randn(8, 6).half().float()
    scaling = Scaling(initial=1024.0, growth_steps=None) if name == "fp16" else None
    precision = Precision(model, name=name, device=CPU, scaling=scaling, clip_norm=clip_norm)
    precision.backward(model(images.to(precision.compute_dtype)).float().square().mean())
    precision.update_(torch.optim.SGD(precision.masters.values(), lr=1.0, fused=True))
    plain(images).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    rounding = 1e-6 if name == "fp32" else 4e-3
    assert precision.figures()["grad_norm"] == pytest.approx(float(norm), rel=rounding)
    torch.manual_seed(0)
    start = nn.Linear(6, 4)
    for key, weight in plain.named_parameters():
        moved = weight.detach() - start.get_parameter(key).detach()
        ours = precision.masters[key].detach() - start.get_parameter(key).detach()
        assert float((ours - moved).norm()) <= max(5 * rounding * float(moved.norm()), 1e-6)
