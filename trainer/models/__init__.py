"""Classifiers; a model that torchvision has, too, has torchvision's parameter names."""

from collections.abc import Callable
from typing import Any

from torch import nn

from bigbatch.trainer.models.alexnet import alexnet_bn
from bigbatch.trainer.models.norm import NormFactory
from bigbatch.trainer.models.resnet import resnet18, resnet34, resnet50, resnet101, resnet152
from bigbatch.trainer.models.resnet9 import resnet9

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "resnet152": resnet152,
    "alexnet_bn": alexnet_bn,
    "resnet9": resnet9,
}


def build_model(name: str, *, num_classes: int, norm: NormFactory, **options: Any) -> nn.Module:
    """Build the model of that name; options go to its own function, such as width to resnet9."""
    return MODELS[name](num_classes=num_classes, norm=norm, **options)
