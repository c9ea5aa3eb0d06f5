"""ResNet v1.5 in depths 18 to 152; parameter names, order and shapes are torchvision's.

He et al. 2015 (arXiv 1512.03385); v1.5 strides in the 3x3 convolution of a bottleneck, not in its first 1x1.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.trainer.models.norm import NormFactory, can_join, norm_relu, normalize_views

if TYPE_CHECKING:
    from bigbatch.trainer.models.regions import Region


class BlurConv2d(nn.Conv2d):
    """Convolves with a stride, after a blur of each input channel by [1, 2, 1] / 4 along both sides.

    Source: Zhang 2019, arXiv 1904.11486. Zeros surround the image. The blur's kernel is exact in half precision and in
    no state_dict; the one parameter has the plain convolution's name and shape. FFCV and Mosaic blur before the
    convolution, as here. Zhang blurs after it, with the stride in the blur: four times the work for the convolution.
    """

    blur_kernel_C1HW: Tensor

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, stride: int, padding: int, bias: bool
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias)
        row_W = torch.tensor([1.0, 2.0, 1.0]) / 4
        kernel_C1HW = torch.outer(row_W, row_W).repeat(in_channels, 1, 1, 1)
        self.register_buffer("blur_kernel_C1HW", kernel_C1HW, persistent=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        blur = partial(
            F.conv2d, images_BCHW, self.blur_kernel_C1HW.to(images_BCHW.dtype), padding=1, groups=self.in_channels
        )
        if self.kernel_size == (1, 1):  # reads every stride-th pixel only: the blur need not make the others
            return F.conv2d(blur(stride=self.stride), self.weight, self.bias)
        return super().forward(blur())


def conv(
    in_channels: int, out_channels: int, *, kernel_size: int, stride: int = 1, blurpool: bool = False
) -> nn.Conv2d:
    """Make a convolution that keeps the size at stride 1; no bias, since a norm follows and would subtract it."""
    convolution = BlurConv2d if blurpool and stride > 1 else nn.Conv2d
    return convolution(in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)


class ResidualBlock(nn.Module):
    """Adds the output of convolutions with norms (conv1, bn1, conv2, bn2 and so on) to its input.

    layers: output channels, kernel size and stride of each convolution.
    """

    def __init__(
        self, in_channels: int, layers: Sequence[tuple[int, int, int]], *, norm: NormFactory, blurpool: bool
    ) -> None:
        super().__init__()
        channels = in_channels
        for number, (out_channels, kernel_size, stride) in enumerate(layers, 1):
            convolution = conv(channels, out_channels, kernel_size=kernel_size, stride=stride, blurpool=blurpool)
            self.add_module(f"conv{number}", convolution)
            self.add_module(f"bn{number}", norm(out_channels))
            channels = out_channels
        self.num_layers = len(layers)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        stride = max(stride for _, _, stride in layers)
        if stride > 1 or in_channels != channels:  # the block changes the shape: no identity
            projection = conv(in_channels, channels, kernel_size=1, stride=stride, blurpool=blurpool)
            self.downsample = nn.Sequential(projection, norm(channels))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        norms, identity = [getattr(self, f"bn{self.num_layers}")], images_BCHW
        if self.downsample is not None and can_join(images_BCHW, norms[0], self.downsample[1]):
            identity = self.downsample[0](images_BCHW)
            norms.append(self.downsample[1])
        elif self.downsample is not None:
            identity = self.downsample(images_BCHW)
        branch = images_BCHW
        for number in range(1, self.num_layers):
            branch = getattr(self, f"conv{number}")(branch)
            branch = norm_relu(getattr(self, f"bn{number}"), self.relu, branch)
        branch = getattr(self, f"conv{self.num_layers}")(branch)
        if len(norms) > 1:
            return normalize_views(*zip(norms, (branch, identity), strict=True), has_relu=True)
        summed: Tensor = self.relu(norms[0](branch) + identity)
        return summed


def basic(channels: int, stride: int) -> list[tuple[int, int, int]]:
    """Return the layers of a block of ResNet-18 and 34: two 3x3 convolutions."""
    return [(channels, 3, stride), (channels, 3, 1)]


def bottleneck(channels: int, stride: int) -> list[tuple[int, int, int]]:
    """Return the layers of a block of ResNet-50, 101 and 152: 1x1, 3x3 and 1x1, the last four times as wide."""
    return [(channels, 1, 1), (channels, 3, stride), (4 * channels, 1, 1)]


class ResNet(nn.Module):
    """Runs a stem, four stages of residual blocks, global average pool and linear classifier.

    zero_init_residual starts the last norm scale of every block at 0, so that each block begins as its
    shortcut and signals pass a deep net unchanged: it lets the large learning rates of large batches start
    stably (Goyal et al. 2017, arXiv 1706.02677; Jia et al. 2018, arXiv 1807.11205).
    blurpool blurs before every strided convolution but the first, which reads the image: FFCV's choice (at least
    16 input channels). The max-pool stays as it is; Mosaic would blur there too.
    """

    def __init__(
        self,
        layers: Callable[[int, int], list[tuple[int, int, int]]],
        num_blocks: Sequence[int],
        *,
        num_classes: int = 1000,
        norm: NormFactory = nn.BatchNorm2d,
        zero_init_residual: bool = True,
        blurpool: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = conv(3, 64, kernel_size=7, stride=2)
        self.bn1 = norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        in_channels = 64
        for number, count in enumerate(num_blocks, 1):
            channels, blocks = 32 * 2**number, []
            for index in range(count):
                # the first block halves the resolution, except behind the max-pool
                of_block = layers(channels, 2 if index == 0 and number > 1 else 1)
                blocks.append(ResidualBlock(in_channels, of_block, norm=norm, blurpool=blurpool))
                in_channels = of_block[-1][0]
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # He et al. by fan-out, as in torchvision
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, ResidualBlock):
                nn.init.zeros_(module.get_parameter(f"bn{module.num_layers}.weight"))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features_BCHW = self.stem(images_BCHW)
        for number in range(1, 5):
            features_BCHW = getattr(self, f"layer{number}")(features_BCHW)
        logits_BK: Tensor = self.head(features_BCHW)
        return logits_BK

    def stem(self, images_BCHW: Tensor) -> Tensor:
        """Compute the layers before the first block: (B, 64, H / 4, W / 4), a sixteenth of the pixels."""
        features_BCHW: Tensor = self.maxpool(norm_relu(self.bn1, self.relu, self.conv1(images_BCHW)))
        return features_BCHW

    def head(self, features_BCHW: Tensor) -> Tensor:
        """Compute the layers after the last block: the logits (B, K)."""
        logits_BK: Tensor = self.fc(self.avgpool(features_BCHW).flatten(1))
        return logits_BK

    def prepare_compile_(self) -> None:
        """Take layers of the same values and weights whose compiled training is faster on a GPU, in place."""
        from bigbatch.trainer.models.max_pool import MaxPool3x3
        from bigbatch.trainer.models.stem_conv import StemConv2d

        with torch.device("meta"):  # draws no numbers for weights that the next line replaces
            convolution = StemConv2d(64)
        convolution.weight = self.conv1.weight
        self.conv1, self.maxpool = convolution.train(self.training), MaxPool3x3().train(self.training)

    def residual_blocks(self) -> list[nn.Module]:
        return [block for number in range(1, 5) for block in getattr(self, f"layer{number}")]

    def regions(self) -> "list[Region]":
        return [(self, "stem"), *((block, "forward") for block in self.residual_blocks()), (self, "head")]


# Each takes num_classes, norm, zero_init_residual and blurpool.
resnet18 = partial(ResNet, basic, (2, 2, 2, 2))
resnet34 = partial(ResNet, basic, (3, 4, 6, 3))
resnet50 = partial(ResNet, bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, bottleneck, (3, 4, 23, 3))
resnet152 = partial(ResNet, bottleneck, (3, 8, 36, 3))
