"""Why LARS has fp32 masters: the same arithmetic in fp16 leaves weights where they are (Jia et al. 2018)."""

import math

import pytest
import torch
from torch import nn

from benchmarks.largebatch.half_lars import HalfLARS
from bigbatch.trainer.optim.lars import LARS

FIRST_LR, PEAK_LR = 24.699 / 31 / 19, 24.699
"""Of imagenet/resnet50_64k: 31 epochs of warm-up of 19 steps each."""


def step(optimizer: type[torch.optim.Optimizer], *, lr: float, grad_rms: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A 3x3 convolution of ResNet-50's third stage as He et al. 2015 start it, before and after one step."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(256, 256, 3, 3, generator=generator) * math.sqrt(2 / (9 * 256))
    weight = nn.Parameter(start.half().float())
    weight.grad = grad_rms * torch.randn(weight.shape, generator=generator)
    before = weight.detach().clone()
    optimizer([weight], lr=lr, weight_decay=1e-4, momentum=0.9, trust_coefficient=0.001).step()
    return before, weight.detach()


def share_moved(optimizer: type[torch.optim.Optimizer], *, lr: float, grad_rms: float) -> float:
    before, after = step(optimizer, lr=lr, grad_rms=grad_rms)
    return float((before != after).double().mean())


@pytest.mark.parametrize("grad_rms", [1e-6, 1e-7, 1e-8])
def test_half_lars_in_fp16_drives_updates_to_zero_where_fp32_moves_the_weights(grad_rms: float) -> None:
    """An update is lr * trust_coefficient = 4e-5 of the weight at most, and numbers of fp16 lie 5e-4 to 1e-3 apart."""
    assert share_moved(LARS, lr=FIRST_LR, grad_rms=grad_rms) > 0.99
    assert share_moved(HalfLARS, lr=FIRST_LR, grad_rms=grad_rms) < 0.03


def test_half_lars_is_the_same_arithmetic_where_its_range_suffices() -> None:
    before, in_fp32 = step(LARS, lr=PEAK_LR, grad_rms=1e-4)
    _, in_fp16 = step(HalfLARS, lr=PEAK_LR, grad_rms=1e-4)
    assert float((in_fp16 - in_fp32).norm() / (in_fp32 - before).norm()) < 0.03
    assert torch.equal(in_fp16, in_fp16.half().float()), "nothing is kept that fp16 cannot hold"
