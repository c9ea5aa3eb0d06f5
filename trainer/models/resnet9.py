"""David Page's ResNet-9 for CIFAR-10 (myrtle.ai, "How to Train Your ResNet", parts 4 and 8)."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.models.norm import JoinedSequential, NormFactory

MAX_WIDTH = 1024
"""Largest width: the weights take 7 GB in fp32."""

if TYPE_CHECKING:
    from bigbatch.trainer.models.regions import Region

ActivationFactory = Callable[[], nn.Module]


class ConvBlock(JoinedSequential):
    """Runs a 3x3 convolution, optional 2x2 max-pool, norm and activation.

    pool_first puts the max-pool before norm and activation, which then have a quarter of the pixels to read
    (Page's part 8); otherwise it comes last, as in the earlier parts.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        pool: bool = False,
        pool_first: bool,
        norm: NormFactory,
        activation: ActivationFactory,
    ) -> None:
        max_pool = [nn.MaxPool2d(2)] if pool else []
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            *(max_pool if pool_first else []),
            norm(out_channels),
            activation(),
            *([] if pool_first else max_pool),
        )


class Residual(nn.Module):
    """Adds the output of two blocks to their input, with no activation after the sum."""

    def __init__(self, channels: int, *, block: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.res1 = block(channels, channels)
        self.res2 = block(channels, channels)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        branch_BCHW: Tensor = self.res2(self.res1(images_BCHW))
        return images_BCHW + branch_BCHW


class ResNet9(nn.Module):
    """Classifies by eight convolutions and a linear layer; takes any input with sides of at least 8 pixels."""

    def __init__(
        self, *, num_classes: int, width: int, logit_scale: float, prep: nn.Module, block: Callable[..., nn.Module]
    ) -> None:
        super().__init__()
        self.logit_scale = logit_scale
        self.prep = prep
        # three max-pools of 2 in all: hence sides of at least 8 pixels
        self.layer1 = nn.Sequential(block(width, 2 * width, pool=True), Residual(2 * width, block=block))
        self.layer2 = block(2 * width, 4 * width, pool=True)
        self.layer3 = nn.Sequential(block(4 * width, 8 * width, pool=True), Residual(8 * width, block=block))
        self.linear = nn.Linear(8 * width, num_classes, bias=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = self.head(self.layer3(self.layer2(self.layer1(self.prep(images_BCHW)))))
        return logits_BK

    def head(self, features_BCHW: Tensor) -> Tensor:
        """Compute the layers after the last block: the logits (B, K)."""
        # Page's MaxPool2d(4) for 32 x 32 input; amax would split the gradient between equal half values.
        features_BC = F.max_pool2d(features_BCHW, features_BCHW.shape[2:]).flatten(1)
        logits_BK: Tensor = self.linear(features_BC) * self.logit_scale
        return logits_BK

    def residual_blocks(self) -> list[nn.Module]:
        return [self.layer1[1], self.layer3[1]]

    def regions(self) -> "list[Region]":
        blocks = (self.prep, *self.layer1, self.layer2, *self.layer3)
        return [*((block, "forward") for block in blocks), (self, "head")]


def freeze_scale_(norm: nn.Module, value: float) -> nn.Module:
    """Replace the scales of a batch norm by a constant buffer of the same name, which no optimizer sees."""
    scale_C = torch.full_like(norm.get_parameter("weight"), value, requires_grad=False)
    # a buffer cannot take the name of an existing parameter
    del norm.weight
    norm.register_buffer("weight", scale_C)
    return norm


def resnet9(
    *,
    num_classes: int = 10,
    width: int = 64,
    norm: NormFactory = nn.BatchNorm2d,
    pool_first: bool = True,
    celu_alpha: float | None = None,
    norm_scale: float | None = None,
    logit_scale: float = 0.125,
    is_whitened: bool = False,
) -> ResNet9:
    """Return ResNet-9 with width, 2, 4 and 8 times width channels, and the additions of part 8 of Page's series.

    celu_alpha: CELU instead of ReLU. norm_scale: fixes batch norm's scales. is_whitened: a fixed 3x3 convolution, to be
    fitted to images, and a learned 1x1 one replace the first convolution. A positive factor on norm_scale, norm biases
    and celu_alpha, with logit_scale divided by it, does not change the function: Page has norm_scale 1/4, and then 1.
    """

    if not 0 < width <= MAX_WIDTH:  # a config may come from elsewhere
        raise ConfigError(f"model.options.width={width} must be 1 to {MAX_WIDTH}")

    def make_norm(num_channels: int) -> nn.Module:
        layer = norm(num_channels)
        return layer if norm_scale is None else freeze_scale_(layer, norm_scale)

    def activation() -> nn.Module:
        return nn.ReLU(inplace=True) if celu_alpha is None else nn.CELU(celu_alpha, inplace=True)

    block = partial(ConvBlock, pool_first=pool_first, norm=make_norm, activation=activation)
    prep: nn.Module = block(3, width)
    if is_whitened:
        from bigbatch.trainer.models.whitening import PATCH, PatchWhitening

        pointwise = nn.Conv2d(PATCH, width, kernel_size=1, bias=False)
        prep = JoinedSequential(PatchWhitening(), pointwise, make_norm(width), activation())
    return ResNet9(num_classes=num_classes, width=width, logit_scale=logit_scale, prep=prep, block=block)
