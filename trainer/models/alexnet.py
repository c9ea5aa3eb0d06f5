"""AlexNet with batch norm, for 224 x 224 images: the second network of Jia et al. 2018."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from bigbatch.trainer.models.norm import JoinedSequential, NormFactory

if TYPE_CHECKING:
    from bigbatch.trainer.models.regions import Region


def conv_norm_relu(
    in_channels: int, out_channels: int, *, kernel_size: int, stride: int = 1, padding: int, norm: NormFactory
) -> list[nn.Module]:
    """Make a convolution, its norm and activation. It has no bias: the norm would subtract it."""
    return [
        nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=False),
        norm(out_channels),
        nn.ReLU(inplace=True),
    ]


class PoolIfLarger(nn.AdaptiveAvgPool2d):
    """Pools adaptively, but passes input of output_size unchanged: on a GPU the pool's backward has no fixed order."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return images of output_size x output_size."""
        if images_BCHW.shape[2:] == (self.output_size, self.output_size):
            return images_BCHW
        return super().forward(images_BCHW)


class AlexNetBN(nn.Module):
    """Classifies by AlexNet, with a batch norm after each of the five convolutions and one more after Pool5.

    Layer sizes, classifier and init: torchvision's AlexNet (Krizhevsky 2014, arXiv 1404.5997).
    Norm after every convolution, none of the local response normalisation: AlexNet-BN of You et al. 2017
    (arXiv 1708.03888). Norm after Pool5: Jia et al. 2018 (arXiv 1807.11205) needed it at batch 64K.
    Dropout draws from the global generator: set it to 0 if runs of different world sizes must agree.
    """

    def __init__(self, *, num_classes: int, norm: NormFactory, dropout: float) -> None:
        super().__init__()
        self.features = JoinedSequential(
            *conv_norm_relu(3, 64, kernel_size=11, stride=4, padding=2, norm=norm),
            nn.MaxPool2d(kernel_size=3, stride=2),
            *conv_norm_relu(64, 192, kernel_size=5, padding=2, norm=norm),
            nn.MaxPool2d(kernel_size=3, stride=2),
            *conv_norm_relu(192, 384, kernel_size=3, padding=1, norm=norm),
            *conv_norm_relu(384, 256, kernel_size=3, padding=1, norm=norm),
            *conv_norm_relu(256, 256, kernel_size=3, padding=1, norm=norm),
            nn.MaxPool2d(kernel_size=3, stride=2),
            norm(256),
        )
        # a 224 x 224 image has 6 x 6 features
        self.avgpool = PoolIfLarger(6)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = self.head(self.features(images_BCHW))
        return logits_BK

    def head(self, features_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = self.classifier(self.avgpool(features_BCHW).flatten(1))
        return logits_BK

    def residual_blocks(self) -> list[nn.Module]:
        return []

    def regions(self) -> "list[Region]":
        return [(self.features, "forward"), (self, "head")]


def alexnet_bn(*, num_classes: int = 1000, norm: NormFactory = nn.BatchNorm2d, dropout: float = 0.5) -> AlexNetBN:
    return AlexNetBN(num_classes=num_classes, norm=norm, dropout=dropout)
