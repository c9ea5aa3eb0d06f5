"""Blur before a stride, against sums over pixels in float64."""

import pytest
import torch
import torchvision
from torch import Tensor, nn

from bigbatch.parts import load
from bigbatch.trainer.models import MODELS
from bigbatch.trainer.models.resnet import BlurConv2d
from bigbatch.trainer.step.precision import Precision

RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def blurred_by_hand(images_BCHW: Tensor) -> Tensor:
    """Each pixel the sum over its neighbours, weighted by (1, 2, 1) / 4 in either direction; zeros outside."""
    padded = nn.functional.pad(images_BCHW.double(), (1, 1, 1, 1))
    height, width = images_BCHW.shape[2:]
    parts = [
        (2 - abs(dy)) * (2 - abs(dx)) / 16 * padded[:, :, 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]
        for dy in (-1, 0, 1)
        for dx in (-1, 0, 1)
    ]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("side", [8, 9])
@pytest.mark.parametrize("kernel_size", [1, 3])
def test_blurpool_convolution_of_the_blurred_image(kernel_size: int, side: int) -> None:
    blur = BlurConv2d(4, 6, kernel_size, stride=2, padding=kernel_size // 2, bias=False)
    plain = nn.Conv2d(4, 6, kernel_size, stride=2, padding=kernel_size // 2, bias=False).double()
    plain.load_state_dict({"weight": blur.weight.double()})
    images_BCHW = torch.randn(2, 4, side, side + 3)
    want = plain(blurred_by_hand(images_BCHW))
    got = blur(images_BCHW)
    assert got.shape == plain(images_BCHW.double()).shape
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(got.double(), plain(images_BCHW.double()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", RESNETS)
def test_blurpool_blurred_are_the_strided_convolutions_but_the_first_and_names_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        model, peer = load(MODELS[name])(blurpool=True), getattr(torchvision.models, name)()
    strided = [n for n, module in peer.named_modules() if isinstance(module, nn.Conv2d) and module.stride == (2, 2)]
    assert strided[0] == "conv1"
    assert len(strided) == 7
    assert [n for n, module in model.named_modules() if isinstance(module, BlurConv2d)] == strided[1:]
    assert all(peer.get_submodule(n).in_channels >= 16 > peer.conv1.in_channels for n in strided[1:])  # FFCV's rule
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in peer.state_dict().items()}


def test_blurpool_half_precision_in_channels_last() -> None:
    blur = BlurConv2d(16, 16, 3, stride=2, padding=1, bias=False).to(memory_format=torch.channels_last)
    whole = BlurConv2d(16, 16, 3, stride=2, padding=1, bias=False).double()
    half = Precision(blur, name="bf16", device=torch.device("cpu")).compute_dtype
    whole.weight.data.copy_(blur.weight.data)
    images_BCHW = torch.randn(2, 16, 10, 10).to(half).to(memory_format=torch.channels_last)
    got = blur(images_BCHW)
    assert got.dtype == half
    assert got.is_contiguous(memory_format=torch.channels_last)
    want = whole(images_BCHW.double()).detach()
    assert float((got.detach().double() - want).abs().max()) < 4 * 2**-8 * float(want.abs().max())
    got.sum().backward()
    assert blur.weight.grad is not None
    assert bool(blur.weight.grad.isfinite().all())
    assert not blur.blur_kernel_C1HW.requires_grad
