"""ResNet's first convolution, computed over blocks of 2 x 2 pixels when that is faster."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 16
"""Channels of a block: 2 x 2 pixels of 3 channels, and zeros up to a multiple that tensor cores take."""


class StemConv2d(nn.Conv2d):
    """Convolves 3 channels by 7 x 7, stride 2, padding 3; in compiled bf16 training on a GPU by blocks of 2 x 2 pixels.

    cuDNN 9.19 has a kernel for three channels in fp16, and none in bf16: with 256 images of 224 x 224 on an H200,
    forward and the gradient of the weights take 1.1 ms in fp16, 2.9 in bf16, and 1.5 in bf16 blocks, copies included.
    The products are the same. ResNets on TPUs use this space-to-depth convolution, too.
    """

    def __init__(self, out_channels: int) -> None:
        super().__init__(3, out_channels, kernel_size=7, stride=2, padding=3, bias=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return features of half the sides, rounded up."""
        is_even = images_BCHW.shape[2] % 2 == images_BCHW.shape[3] % 2 == 0
        is_bf16 = images_BCHW.is_cuda and images_BCHW.dtype == self.weight.dtype == torch.bfloat16
        # in compiled code the copies are fused into other kernels; an exported model keeps the plain form
        if torch.compiler.is_compiling() and self.training and is_bf16 and is_even:
            return convolve_blocks(images_BCHW, self.weight)
        return super().forward(images_BCHW)


def convolve_blocks(images_BCHW: Tensor, weight_OCHW: Tensor) -> Tensor:
    """Compute F.conv2d(images, weight, stride=2, padding=3) of 3 channels, 7 x 7 weights and even sides."""
    blocks_BCHW = F.pad(images_BCHW, (4, 2, 4, 2))  # a window of 8 begins 4 before its middle
    # an eighth row and column of zeros, first: no window reads further back than 3 pixels
    blocks_OCHW = F.pad(weight_OCHW, (1, 0, 1, 0))
    return F.conv2d(_in_blocks(blocks_BCHW), _in_blocks(blocks_OCHW))


def _in_blocks(pixels_BCHW: Tensor) -> Tensor:
    """Return each 2 x 2 pixels as one pixel of CHANNELS channels, channels last."""
    batch, channels, height, width = pixels_BCHW.shape
    pairs_BHWC = pixels_BCHW.permute(0, 2, 3, 1).reshape(batch, height // 2, 2, width // 2, 2, channels)
    blocks_BHWC = pairs_BHWC.transpose(2, 3).reshape(batch, height // 2, width // 2, 4 * channels)
    return F.pad(blocks_BHWC, (0, CHANNELS - 4 * channels)).permute(0, 3, 1, 2)
