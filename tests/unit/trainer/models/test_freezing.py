"""Weights and norms that patterns name stay as they are in training."""

from functools import partial

import pytest
import torch
from error_texts import naming
from torch import nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.frozen import freeze_
from bigbatch.trainer.models.norm import GhostBatchNorm2d, MicrobatchStatistics, flatten_running_statistics


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return build_model("resnet9", num_classes=3, norm=partial(GhostBatchNorm2d, bn_span=4, ghosts_per_step=1), width=2)


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def norms_of(model: nn.Module) -> dict[str, GhostBatchNorm2d]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GhostBatchNorm2d)}


def test_freeze_takes_all_that_patterns_name() -> None:
    model = make_model()
    every = trained_names(model)
    freeze_(model, ("prep.*", "*.bias"))
    assert trained_names(model) == [n for n in every if not n.startswith("prep.") and not n.endswith(".bias")]
    model.train()
    stopped = [name for name, norm in norms_of(model).items() if not norm.training]
    assert stopped == ["prep.1"], "biases alone stop no statistics"


def test_freeze_keeps_the_statistics_of_a_norm_and_computes_by_them() -> None:
    model = make_model()
    norm = norms_of(model)["prep.1"]
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(1, 2)
    before = norm.running_mean.clone(), norm.running_var.clone()
    freeze_(model, ("prep.*",))
    statistics_N = flatten_running_statistics(model)
    MicrobatchStatistics(model, statistics_N, take=statistics_N.lerp_)
    others = [other.num_features for other in norms_of(model).values() if other is not norm]
    assert statistics_N.numel() == 2 * sum(others), "frozen ones do not travel"
    others_N = statistics_N.clone()
    model.train()
    model(torch.randn(4, 3, 16, 16))
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])
    assert not torch.equal(statistics_N, others_N), "the others continue"
    inputs_BCHW = torch.randn(4, norm.num_features, 3, 3)
    mean_C11, var_C11, weight_C11, bias_C11 = (
        each.detach()[:, None, None].double() for each in (*before, norm.weight, norm.bias)
    )
    expected_BCHW = (inputs_BCHW.double() - mean_C11) / (var_C11 + norm.eps).sqrt() * weight_C11 + bias_C11
    torch.testing.assert_close(norm(inputs_BCHW), expected_BCHW.float())


def test_freeze_refuses_what_names_nothing_and_what_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match=naming("model.frozen", "'layer7.*'", "prep.0.weight to linear.weight")):
        freeze_(make_model(), ("prep.*", "layer7.*"))
    with pytest.raises(ConfigError, match=naming("model.frozen=['*']", "train")):
        freeze_(make_model(), ("*",))
