"""Gradients of the real networks, and the row of a step."""

import pytest
import torch

from benchmarks.comm import gradient_sets


def test_gradient_sets_are_the_real_networks() -> None:
    sizes = {
        model: sum(torch.Size(shape).numel() * 4 for shape in gradient_sets.parameter_shapes(model).values())
        for model in ("resnet50", "alexnet_bn")
    }
    assert sizes["resnet50"] == 4 * 25_557_032  # torchvision's count
    assert sizes["alexnet_bn"] == pytest.approx(244e6, rel=0.01)
