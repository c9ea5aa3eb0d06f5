"""ResNet v1.5 in depths 18 to 152; parameter names, order and shapes are torchvision's.

He et al. 2015 (arXiv 1512.03385); v1.5 strides in the 3x3 convolution of a bottleneck, not in its first 1x1.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from bigbatch.trainer.models.blurpool import BlurConv2d
from bigbatch.trainer.models.norm import NormFactory
from bigbatch.trainer.models.regions import Region


def conv(
    in_channels: int, out_channels: int, *, kernel_size: int, stride: int = 1, blurpool: bool = False
) -> nn.Conv2d:
    """Make a convolution that keeps the size at stride 1; no bias, since a norm follows and would subtract it."""
    convolution = BlurConv2d if blurpool and stride > 1 else nn.Conv2d
    return convolution(in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)


def shortcut(
    in_channels: int, out_channels: int, *, stride: int, norm: NormFactory, blurpool: bool
) -> nn.Sequential | None:
    """Make a 1x1 projection where the block changes the shape, else None: the identity."""
    if stride == 1 and in_channels == out_channels:
        return None
    projection = conv(in_channels, out_channels, kernel_size=1, stride=stride, blurpool=blurpool)
    return nn.Sequential(projection, norm(out_channels))


class BasicBlock(nn.Module):
    """Adds two 3x3 convolutions to its input: the block of ResNet-18 and 34."""

    expansion = 1
    last_norm = "bn2"

    def __init__(self, in_channels: int, channels: int, *, stride: int, norm: NormFactory, blurpool: bool) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, channels, kernel_size=3, stride=stride, blurpool=blurpool)
        self.bn1 = norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv(channels, channels, kernel_size=3)
        self.bn2 = norm(channels)
        self.downsample = shortcut(in_channels, channels, stride=stride, norm=norm, blurpool=blurpool)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        identity = images_BCHW if self.downsample is None else self.downsample(images_BCHW)
        branch = self.relu(self.bn1(self.conv1(images_BCHW)))
        branch = self.bn2(self.conv2(branch))
        return self.relu(branch + identity)


class Bottleneck(nn.Module):
    """Adds 1x1, 3x3 and 1x1 convolutions to its input, the last four times as wide: for ResNet-50, 101 and 152."""

    expansion = 4
    last_norm = "bn3"

    def __init__(self, in_channels: int, channels: int, *, stride: int, norm: NormFactory, blurpool: bool) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = conv(in_channels, channels, kernel_size=1)
        self.bn1 = norm(channels)
        self.conv2 = conv(channels, channels, kernel_size=3, stride=stride, blurpool=blurpool)
        self.bn2 = norm(channels)
        self.conv3 = conv(channels, out_channels, kernel_size=1)
        self.bn3 = norm(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(in_channels, out_channels, stride=stride, norm=norm, blurpool=blurpool)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        identity = images_BCHW if self.downsample is None else self.downsample(images_BCHW)
        branch = self.relu(self.bn1(self.conv1(images_BCHW)))
        branch = self.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        return self.relu(branch + identity)


Block = type[BasicBlock] | type[Bottleneck]


def stage(
    block: Block, in_channels: int, *, channels: int, num_blocks: int, norm: NormFactory, blurpool: bool
) -> nn.Sequential:
    """Make the blocks of one resolution; the first halves it, except in the stage that follows the max-pool."""
    stride = 1 if channels == 64 else 2
    out_channels = channels * block.expansion
    blocks = [block(in_channels, channels, stride=stride, norm=norm, blurpool=blurpool)]
    blocks += [block(out_channels, channels, stride=1, norm=norm, blurpool=blurpool) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks)


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
        block: Block,
        num_blocks: Sequence[int],
        *,
        num_classes: int = 1000,
        norm: NormFactory = nn.BatchNorm2d,
        zero_init_residual: bool = True,
        blurpool: bool = False,
    ) -> None:
        super().__init__()
        wide = block.expansion
        make_stage = partial(stage, block, norm=norm, blurpool=blurpool)
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = make_stage(64, channels=64, num_blocks=num_blocks[0])
        self.layer2 = make_stage(64 * wide, channels=128, num_blocks=num_blocks[1])
        self.layer3 = make_stage(128 * wide, channels=256, num_blocks=num_blocks[2])
        self.layer4 = make_stage(256 * wide, channels=512, num_blocks=num_blocks[3])
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * wide, num_classes)
        init_(self, zero_init_residual=zero_init_residual)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features_BCHW = self.stem(images_BCHW)
        logits_BK: Tensor = self.head(self.layer4(self.layer3(self.layer2(self.layer1(features_BCHW)))))
        return logits_BK

    def stem(self, images_BCHW: Tensor) -> Tensor:
        """Compute all before the first block: (B, 64, H / 4, W / 4), a sixteenth of the pixels."""
        features_BCHW: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images_BCHW))))
        return features_BCHW

    def head(self, features_BCHW: Tensor) -> Tensor:
        """Compute all after the last block: the logits (B, K)."""
        logits_BK: Tensor = self.fc(self.avgpool(features_BCHW).flatten(1))
        return logits_BK

    def residual_blocks(self) -> list[nn.Module]:
        """List the blocks from the input on."""
        return [*self.layer1, *self.layer2, *self.layer3, *self.layer4]

    def regions(self) -> list[Region]:
        """List stem, blocks and head."""
        return [(self, "stem"), *((block, "forward") for block in self.residual_blocks()), (self, "head")]


def init_(model: ResNet, *, zero_init_residual: bool) -> None:
    """Initialize convolutions as He did, by fan-out (torchvision's); the norms keep their own 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif zero_init_residual and isinstance(module, BasicBlock | Bottleneck):
            nn.init.zeros_(module.get_parameter(f"{module.last_norm}.weight"))


# Each takes num_classes, norm, zero_init_residual and blurpool.
resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(ResNet, Bottleneck, (3, 8, 36, 3))
