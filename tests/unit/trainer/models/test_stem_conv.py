"""The first convolution over blocks of pixels, beside torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F

from bigbatch.trainer.models.stem_conv import StemConv2d, convolve_blocks


@pytest.mark.parametrize("shape", [(2, 3, 32, 48), (1, 3, 2, 6)])
def test_convolution_of_blocks_has_torchs_sums_and_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    images_BCHW = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    weight_OCHW = torch.randn(8, 3, 7, 7, dtype=torch.float64, requires_grad=True)
    images_BCHW.requires_grad_()
    found = []
    for features_BCHW in (
        convolve_blocks(images_BCHW, weight_OCHW),
        F.conv2d(images_BCHW, weight_OCHW, stride=2, padding=3),
    ):
        grads = torch.autograd.grad(features_BCHW.square().sum(), [images_BCHW, weight_OCHW])
        found.append([features_BCHW, *grads])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_on_a_cpu_is_torchs(dtype: torch.dtype) -> None:
    conv, images_BCHW = StemConv2d(8).to(dtype), torch.randn(2, 3, 16, 16, dtype=dtype)
    assert torch.equal(conv(images_BCHW), F.conv2d(images_BCHW, conv.weight, stride=2, padding=3))


@pytest.mark.gpu
def test_convolution_in_bf16_on_a_gpu_rounds_as_torchs_does() -> None:
    torch.manual_seed(0)
    conv = StemConv2d(64).cuda().bfloat16()
    images_BCHW = torch.randn(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    images_BCHW = images_BCHW.contiguous(memory_format=torch.channels_last)
    truth_BCHW = F.conv2d(images_BCHW.double(), conv.weight.double(), stride=2, padding=3)
    distance = (conv(images_BCHW).double() - truth_BCHW).norm() / truth_BCHW.norm()
    assert distance < torch.finfo(torch.bfloat16).eps / 2  # the result is rounded once
