"""Starts of weights by name, against the closed form of their standard deviation."""

import math

import pytest
import torch
from error_texts import naming
from torch import nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.initialization import initialize_

IN, OUT, KERNEL = 48, 96, 3
FAN_IN, FAN_OUT = IN * KERNEL**2, OUT * KERNEL**2
CONV_STD = {
    "fan_in": math.sqrt(2 / FAN_IN),
    "fan_out": math.sqrt(2 / FAN_OUT),
    "xavier": math.sqrt(2 / (FAN_IN + FAN_OUT)),
}
LINEAR_STD = {"fan_in": math.sqrt(2 / 300), "fan_out": math.sqrt(2 / 200), "xavier": math.sqrt(2 / 500)}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(IN, OUT, KERNEL), nn.BatchNorm2d(OUT), nn.Flatten(), nn.Linear(300, 200))


def require_normal(weight: torch.Tensor, std: float) -> None:
    """Mean and deviation within 5 of their own deviations, and as many values within one deviation as a normal has."""
    weight = weight.detach()
    count = weight.numel()
    assert abs(float(weight.mean())) < 5 * std / math.sqrt(count)
    assert abs(float(weight.std()) / std - 1) < 5 / math.sqrt(2 * count)
    share = math.erf(1 / math.sqrt(2))
    assert abs(float((weight.abs() < std).float().mean()) - share) < 5 * math.sqrt(share * (1 - share) / count)


@pytest.mark.parametrize("name", CONV_STD)
def test_init_has_the_standard_deviation_of_its_name(name: str) -> None:
    initialize_(model := net(), name, linear_std=None)
    require_normal(model[0].weight, CONV_STD[name])
    require_normal(model[3].weight, LINEAR_STD[name])
    assert model[0].bias.tolist() == [0.0] * OUT
    assert model[3].bias.tolist() == [0.0] * 200
    assert model[1].weight.tolist() == [1.0] * OUT


def test_linear_std_goes_before_init_and_leaves_convolutions_alone() -> None:
    initialize_(model := net(), "fan_in", linear_std=0.01)
    require_normal(model[3].weight, 0.01)
    require_normal(model[0].weight, CONV_STD["fan_in"])
    initialize_(model := net(), None, linear_std=0.01)
    require_normal(model[3].weight, 0.01)
    assert torch.equal(model[0].weight, net()[0].weight)


def test_init_of_a_grouped_convolution_counts_a_groups_inputs() -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(64, 128, 3, groups=4)
    initialize_(convolution, "fan_in", linear_std=None)
    require_normal(convolution.weight, math.sqrt(2 / (16 * 9)))


def test_init_leaves_what_is_not_trained_as_it_is() -> None:
    model = build_model("resnet9", num_classes=10, norm=nn.BatchNorm2d, width=4, is_whitened=True)
    before = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    initialize_(model, "fan_out", linear_std=None)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    head = net()
    head[3].requires_grad_(False)
    initialize_(head, "fan_in", linear_std=0.01)
    assert torch.equal(head[3].weight, net()[3].weight)


def test_init_of_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=naming("model.init", "model.linear_std", "null")):
        initialize_(nn.Sequential(nn.BatchNorm2d(3)), "xavier", linear_std=None)
