"""What David Page's bag of tricks makes of ResNet-9 and its update, by closed forms."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor, nn

from bigbatch.errors import CheckpointError
from bigbatch.trainer.build.model import build_classifier
from bigbatch.trainer.build.optimizer import make_optimizer
from bigbatch.trainer.checkpoint.checkpoint import save_checkpoint
from bigbatch.trainer.checkpoint.weights import load_weights_
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.models.norm import GhostBatchNorm2d
from bigbatch.trainer.models.resnet9 import ConvBlock, resnet9
from bigbatch.trainer.step.plan import Parts

LR, DECAY, FACTOR = 0.5, 0.1, 64.0


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def config_of(*words: str) -> Config:
    return load_config(["--config", "cifar10", "--model.options.width=2", *(f"--{word}" for word in words)])


def test_celu_is_its_formula() -> None:
    activation = resnet9(width=2, celu_alpha=0.3).get_submodule("layer2.3")
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    want = x.clamp(min=0) + (0.3 * (torch.exp(x / 0.3) - 1)).clamp(max=0)
    torch.testing.assert_close(activation(x.clone()), want)
    relu = resnet9(width=2).get_submodule("layer2.3")
    assert torch.equal(relu(x.clone()), x.clamp(min=0))


@pytest.mark.parametrize(("sign", "is_same"), [(1, True), (-1, False)])
def test_pooling_goes_through_what_rises(sign: int, is_same: bool) -> None:
    """If all scales are positive and statistics are fixed, both orders compute the same."""
    blocks = [
        ConvBlock(3, 8, pool=True, pool_first=first, norm=nn.BatchNorm2d, activation=lambda: nn.CELU(0.3)).eval()
        for first in (True, False)
    ]
    for block, norm in zip(blocks, ("2", "1"), strict=True):
        with torch.no_grad():
            layer = block.get_submodule(norm)
            assert isinstance(layer, nn.BatchNorm2d)
            layer.weight.copy_(sign * torch.arange(1.0, 9))
            block.get_parameter("0.weight").copy_(torch.linspace(-1, 1, 8 * 27).view(8, 3, 3, 3).sin())
    images_BCHW = torch.randn(2, 3, 8, 8)
    first, last = (block(images_BCHW) for block in blocks)
    assert torch.allclose(first, last, atol=1e-6) is is_same


def test_scales_that_are_frozen_are_no_parameters() -> None:
    model = resnet9(
        width=2, norm_scale=0.25, norm=lambda channels: GhostBatchNorm2d(channels, bn_span=2, ghosts_per_step=2)
    )
    norms = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    trained = dict(model.named_parameters())
    for name, layer in norms.items():
        assert f"{name}.weight" not in trained
        assert f"{name}.bias" in trained
        assert torch.equal(model.state_dict()[f"{name}.weight"], torch.full((layer.num_features,), 0.25))
    assert len(norms) == 8
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in trained.values())


def test_scale_of_a_quarter_is_one_with_four_times_the_rest() -> None:
    """Page's two forms of the frozen scale are the same function: alpha, biases and scale by 4, logits by a quarter."""
    norm = partial(nn.BatchNorm2d, eps=1e-30)
    quarter = resnet9(width=4, norm=norm, norm_scale=0.25, celu_alpha=0.075, logit_scale=0.25).double()
    one = resnet9(width=4, norm=norm, norm_scale=1.0, celu_alpha=0.3, logit_scale=0.0625).double()
    state = {
        name: torch.randn_like(t) * 0.1 if name.endswith("bias") else t for name, t in quarter.state_dict().items()
    }
    quarter.load_state_dict(state)
    scaled = {name: 4 * t if name.endswith("bias") else t for name, t in state.items()}
    one.load_state_dict(scaled | {name: t for name, t in one.state_dict().items() if is_scale(name, t)})
    images_BCHW = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(one(images_BCHW), quarter(images_BCHW))


def is_scale(name: str, tensor: Tensor) -> bool:
    return name.endswith("weight") and tensor.ndim == 1


@pytest.mark.parametrize("excluded", [False, True])
def test_biases_move_by_the_factor_and_decay_as_the_others(excluded: bool) -> None:
    """A step of plain SGD: w - lr * (g + decay * w), and of a bias b - factor * lr * (g + decay / factor * b)."""
    config = config_of(
        *("optimizer.momentum=0", "optimizer.options.nesterov=false", f"optimizer.weight_decay={DECAY}"),
        *(
            f"optimizer.bias_lr_factor={FACTOR}",
            f"optimizer.exclude_bias_and_norm={excluded}",
            "model.options.norm_scale=0.25",
        ),
    )
    model = build_classifier(config, nn.BatchNorm2d)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
        parameter.grad = torch.randn_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    scales = {name: t.clone() for name, t in model.state_dict().items() if is_scale(name, t)}
    optimizer = make_optimizer(config.optimizer, model, {}, lr=1.0)
    parts: Any = SimpleNamespace(optimizer=optimizer, schedule=lambda step: LR, momentum=None)
    Parts.set_lr_(parts, step=0)
    optimizer.step()
    for name, parameter in model.named_parameters():
        w, g = before[name], parameter.grad
        is_bias = name.endswith("bias")
        factor, decay = (FACTOR, 0 if excluded else DECAY / FACTOR) if is_bias else (1, DECAY)
        torch.testing.assert_close(parameter.detach(), w - factor * LR * (g + decay * w), msg=name)
    assert all(torch.equal(model.state_dict()[name], scale) for name, scale in scales.items())
    assert len(scales) == 8


LARS = ("optimizer.name=lars", "optimizer.options.trust_coefficient=0.001", "optimizer.options.eps=0")


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ((), [(9, True, None), (16, False, None)]),
        (
            (*LARS, "optimizer.options.momentum_form=lr_inside", "optimizer.bias_lr_factor=2"),
            [(9, True, None), (8, False, None), (8, False, 2.0)],
        ),
    ],
)
def test_raised_biases_are_a_group_that_lars_does_not_adapt(words: tuple[str, ...], groups: list[Any]) -> None:
    config = config_of(*words)
    found = make_optimizer(config.optimizer, build_classifier(config, nn.BatchNorm2d), {}, lr=1.0).param_groups
    assert [(len(each["params"]), each["adapt"], each.get("lr_factor")) for each in found] == groups


@pytest.mark.parametrize(
    ("here", "named"),
    [
        (("model.options.pool_first=false",), ("model.options.pool_first", " true there", " false here")),
        (("model.options.celu_alpha=0.3",), ("model.options.celu_alpha", " null there", " 0.3 here")),
        (("model.options.norm_scale=0.25",), ("model.options.norm_scale", " null there", " 0.25 here")),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_load_weights_refuses_those_of_another_function(
    here: tuple[str, ...], named: tuple[str, ...], is_old: bool, tmp_path: Path
) -> None:
    """Their names and shapes are the same. Configs from before the keys had one of these functions."""
    config = config_of()
    weights = build_classifier(config, nn.BatchNorm2d).state_dict()
    keys = ("pool_first", "celu_alpha", "norm_scale", "logit_scale", "whitening_eps")
    lines = [line for line in dump_config(config).splitlines() if not (is_old and line.strip().startswith(keys))]
    state = {"step": 3, "config": "\n".join(lines), "model": weights}
    path = save_checkpoint(tmp_path, state, step=3, top1=None, keep=1)
    model = build_classifier(config, nn.BatchNorm2d)
    load_weights_(model, path, config=config)
    assert torch.equal(model.state_dict()["linear.weight"], weights["linear.weight"])
    with pytest.raises(CheckpointError, match=naming(path, *named)):
        load_weights_(model, path, config=config_of(*here))
