"""Models against torchvision, closed forms and plain tensor arithmetic."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bigbatch.errors import ConfigError
from bigbatch.parts import load
from bigbatch.trainer.config.checks import SMALLEST_IMAGE
from bigbatch.trainer.models import MODELS, build_model
from bigbatch.trainer.models.alexnet import PoolIfLarger, alexnet_bn
from bigbatch.trainer.models.norm import GhostBatchNorm2d
from bigbatch.trainer.models.resnet9 import ConvBlock, resnet9

RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def make_on_meta(make: Callable[..., nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("name", RESNETS)
def test_resnet_has_torchvisions_names_order_and_shapes(name: str) -> None:
    ours = make_on_meta(load(MODELS[name]))
    peer = make_on_meta(getattr(torchvision.models, name))
    for mine, theirs in (
        (ours.named_parameters(), peer.named_parameters()),
        (ours.named_buffers(), peer.named_buffers()),
    ):
        assert [(n, t.shape) for n, t in mine] == [(n, t.shape) for n, t in theirs]
    strides = [[m.stride for m in model.modules() if isinstance(m, nn.Conv2d)] for model in (ours, peer)]
    assert strides[0] == strides[1]


def scrambled(model: nn.Module) -> nn.Module:
    """Norm parameters and statistics away from 0 and 1, where an error could hide."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 1.0, 2.0)
    return model


@pytest.mark.slow
def test_resnet_computes_what_torchvision_computes() -> None:
    ours, peer = load(MODELS["resnet18"])(num_classes=10), scrambled(torchvision.models.resnet18(num_classes=10))
    ours.load_state_dict(peer.state_dict(), strict=True)
    images_BCHW = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        for mode in (False, True):
            got, want = ours.train(mode)(images_BCHW), peer.train(mode)(images_BCHW)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    want_buffers = {n: b for n, b in peer.named_buffers() if "running" in n}
    got_buffers = {n: b for n, b in ours.named_buffers() if "running" in n}
    torch.testing.assert_close(got_buffers, want_buffers, rtol=1e-5, atol=1e-5)
    peer.load_state_dict(scrambled(ours).state_dict(), strict=True)
    with torch.no_grad():
        got, want = peer.eval()(images_BCHW), ours.eval()(images_BCHW)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "last"), [("resnet18", "bn2"), ("resnet50", "bn3")])
def test_zero_init_starts_the_last_norm_of_every_block_at_0(name: str, last: str) -> None:
    zeros = [n for n, p in load(MODELS[name])().named_parameters() if n.endswith("weight") and not p.any()]
    assert zeros == [f"layer{stage}.{i}.{last}.weight" for stage, i in stage_blocks(name)]
    model = load(MODELS[name])(zero_init_residual=False)
    assert all(p.any() for n, p in model.named_parameters() if n.endswith("weight"))


def stage_blocks(name: str) -> list[tuple[int, int]]:
    depths = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}[name]
    return [(stage + 1, i) for stage, depth in enumerate(depths) for i in range(depth)]


def test_resnet_convolutions_have_he_fan_out_variance() -> None:
    weight = load(MODELS["resnet18"])().layer4[1].conv2.weight
    want_std = (2 / (512 * 9)) ** 0.5
    # 2.4 million draws: the sample deviation is off by 0.05% (one sigma)
    assert weight.std().item() == pytest.approx(want_std, rel=0.003)


@pytest.mark.parametrize("width", [0, -1, 100_000_000])
def test_resnet9_of_an_impossible_width_is_refused_before_it_takes_memory(width: int) -> None:
    with pytest.raises(ConfigError, match=f"model.options.width={width} must be 1 to 1024"):
        build_model("resnet9", num_classes=10, norm=nn.BatchNorm2d, width=width)


def test_resnet9_logits_are_an_eighth_of_the_linear_layer_on_the_maxima() -> None:
    model = resnet9(num_classes=5, width=4).eval()
    images_BCHW = torch.randn(2, 3, 32, 32)
    features_BCHW = model.layer3(model.layer2(model.layer1(model.prep(images_BCHW))))
    want = features_BCHW.amax((2, 3)) @ model.linear.weight.T / 8
    torch.testing.assert_close(model(images_BCHW), want)


@pytest.mark.parametrize(
    ("pool_first", "order"),
    [
        (True, [nn.Conv2d, nn.MaxPool2d, nn.BatchNorm2d, nn.CELU]),
        (False, [nn.Conv2d, nn.BatchNorm2d, nn.CELU, nn.MaxPool2d]),
    ],
)
def test_resnet9_block_order(pool_first: bool, order: list[type[nn.Module]]) -> None:
    model = resnet9(width=4, pool_first=pool_first, celu_alpha=0.3)
    assert isinstance(model.layer2, ConvBlock)
    assert [type(module) for module in model.layer2] == order
    assert not any(isinstance(module, nn.MaxPool2d) for module in model.prep)


@pytest.mark.long
def test_alexnet_bn_is_torchvisions_alexnet_once_its_norms_are_folded_away() -> None:
    """With every norm an identity and equal weights, only the convolutions' biases are missing."""
    ours = alexnet_bn(num_classes=10, norm=nn.Identity, dropout=0.0).eval()
    peer = torchvision.models.alexnet(num_classes=10).eval()
    with torch.no_grad():
        for module in peer.features:
            if isinstance(module, nn.Conv2d):
                module.bias.zero_()
        for mine, theirs in zip(ours.parameters(), without_conv_biases(peer), strict=True):
            mine.copy_(theirs)
        images_BCHW = torch.randn(1, 3, 80, 80)
        torch.testing.assert_close(ours(images_BCHW), peer(images_BCHW), rtol=1e-5, atol=1e-5)


def without_conv_biases(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if not (n.startswith("features") and n.endswith("bias"))]


class Pooled(TorchDispatchMode):
    """Counts adaptive pools, and their backwards."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "adaptive_avg_pool" in func._schema.name
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("size", "count"), [(224, 0), (192, 2), (256, 2)])
def test_alexnet_bn_pools_adaptively_only_where_features_are_not_6_by_6(size: int, count: int) -> None:
    with torch.device("meta"), Pooled() as pooled:
        alexnet_bn(num_classes=10, dropout=0.0)(torch.zeros(2, 3, size, size)).sum().backward()
    assert pooled.count == count


def test_alexnet_bn_features_of_6_by_6_are_what_the_pool_leaves_as_they_are() -> None:
    features_BCHW = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(PoolIfLarger(6)(features_BCHW), nn.AdaptiveAvgPool2d(6)(features_BCHW))


def test_alexnet_bn_norms_follow_every_convolution_and_pool5() -> None:
    features = make_on_meta(alexnet_bn).features
    before = [type(features[i - 1]) for i, module in enumerate(features) if isinstance(module, nn.BatchNorm2d)]
    assert before == [nn.Conv2d] * 5 + [nn.MaxPool2d]
    assert isinstance(features[-1], nn.BatchNorm2d)
    assert all(module.bias is None for module in features if isinstance(module, nn.Conv2d))


def test_page_of_models_states_their_parameters_and_smallest_images() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| (\d+) \|", page, re.M)
    counts = {name: num_parameters(make_on_meta(load(MODELS[name]))) for name in MODELS}
    assert rows == [(name, f"{counts[name]:,}", str(SMALLEST_IMAGE.get(name, 1))) for name in MODELS]


@pytest.mark.parametrize("name", MODELS)
def test_build_model_passes_classes_and_norm(name: str) -> None:
    norm = partial(GhostBatchNorm2d, bn_span=2, ghosts_per_step=1)
    model = make_on_meta(partial(build_model, name, num_classes=7, norm=norm))
    norms = [type(module) for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert set(norms) == {GhostBatchNorm2d}
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert linear[-1].out_features == 7


def test_resnet_takes_layers_for_compiled_training_without_a_change_of_weights() -> None:
    model: Any = load(MODELS["resnet18"])(num_classes=3).train()
    images_BCHW, names, weights = torch.randn(2, 3, 64, 64), list(model.state_dict()), list(model.parameters())
    expected, drawn = model(images_BCHW), torch.random.get_rng_state()
    model.prepare_compile_()
    assert (type(model.conv1).__name__, type(model.maxpool).__name__) == ("StemConv2d", "MaxPool3x3")
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert list(model.state_dict()) == names
    assert all(mine is before for mine, before in zip(model.parameters(), weights, strict=True))
    assert torch.equal(model(images_BCHW), expected)
