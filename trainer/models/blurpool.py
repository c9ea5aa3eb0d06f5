"""Anti-aliased strides (Zhang 2019, arXiv 1904.11486)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BlurConv2d(nn.Conv2d):
    """Convolves with a stride, after it blurred each channel of its input by [1, 2, 1] / 4 along both sides.

    Zeros surround the image. The kernel is exact in half precision and in no state_dict; the one parameter has the
    plain convolution's name and shape. FFCV and Mosaic blur before the convolution, as here. Zhang blurs after it,
    with the stride in the blur: the convolution then does four times the work.
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
