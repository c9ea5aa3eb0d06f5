"""Table of classifiers; a model that torchvision has, too, has torchvision's parameter names."""

from collections.abc import Callable
from typing import Any

from torch import nn

from bigbatch.parts import load_named

MODELS = {
    **{f"resnet{depth}": f"bigbatch.trainer.models.resnet.resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    "alexnet_bn": "bigbatch.trainer.models.alexnet.alexnet_bn",
    "resnet9": "bigbatch.trainer.models.resnet9.resnet9",
}
"""Name of a model -> import path of the function that makes it."""


def build_model(name: str, *, num_classes: int, norm: Callable[[int], nn.Module], **options: Any) -> nn.Module:
    """Build the model of that name; options go to its own function, such as width to resnet9."""
    model: nn.Module = load_named(MODELS, name, key="model.name")(num_classes=num_classes, norm=norm, **options)
    return model
