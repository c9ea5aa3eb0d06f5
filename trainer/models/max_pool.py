"""Max-pool of 3 x 3 pixels with stride 2, as in ResNet's stem, by kernels of our own in compiled code on a GPU."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton_package

BLOCK = 1024
"""Elements of the result that one program of a kernel computes."""


class MaxPool3x3(nn.MaxPool2d):
    """Max-pool of 3 x 3 pixels, stride 2, padding 1: torch's, with other kernels in compiled training on a GPU.

    Forward and backward of 256 images of 112 x 112 x 64 take 0.4 ms on an H200, with torch's kernels 2.8 and with its
    compiler's 1.8: these look up the windows of one pixel at a time, and ours the four that 2 x 2 pixels share.
    Values, NaNs and the choice among equal maxima are as in torch, and so is the gradient, up to rounding. Eager steps
    keep torch's kernels: Triton needs a C compiler on the machine, as compiling does.
    """

    def __init__(self) -> None:
        super().__init__(kernel_size=3, stride=2, padding=1)
        if torch.cuda.is_available() and has_triton_package():
            register_operators()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Pool (B, C, H, W) to (B, C, H / 2, W / 2), rounded up."""
        if _are_registered and torch.compiler.is_compiling() and self.training and fits_kernels(images_BCHW):
            pooled: Tensor = torch.ops.bigbatch.max_pool3x3(images_BCHW)[0]
            return pooled
        return super().forward(images_BCHW)


def fits_kernels(images_BCHW: Tensor) -> bool:
    """Return whether the kernels can pool these images: they count in int32 and compare in fp32."""
    height, width = images_BCHW.shape[2:]
    return (
        images_BCHW.is_cuda
        and images_BCHW.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and height % 2 == width % 2 == 0
        and images_BCHW.numel() < 2**31
        and images_BCHW.is_contiguous(memory_format=torch.channels_last)
    )


_are_registered = False
"""forward reads it, because torch's compiler traces forward and cannot trace the registration."""


@cache
def register_operators() -> None:
    """Register torch.ops.bigbatch.max_pool3x3, which returns the maxima and their places in the windows, 0 to 8."""
    global _are_registered
    from bigbatch.trainer.models.max_pool_kernels import max_pool_backward, max_pool_forward

    def grid(elements: Tensor) -> tuple[int]:
        return (-(-elements.numel() // BLOCK),)

    @torch.library.triton_op("bigbatch::max_pool3x3", mutates_args={})
    def max_pool(images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        batch, channels, height, width = images_BCHW.shape
        pooled_BCHW = images_BCHW.new_empty((batch, height // 2, width // 2, channels)).permute(0, 3, 1, 2)
        places_BCHW = torch.empty_like(pooled_BCHW, dtype=torch.int8)
        torch.library.wrap_triton(max_pool_forward)[grid(pooled_BCHW)](
            images_BCHW, pooled_BCHW, places_BCHW, channels, height, width, pooled_BCHW.numel(), BLOCK=BLOCK
        )
        return pooled_BCHW, places_BCHW

    @torch.library.triton_op("bigbatch::max_pool3x3_backward", mutates_args={})
    def backward(grad_BCHW: Tensor, places_BCHW: Tensor) -> Tensor:
        batch, channels, height, width = grad_BCHW.shape
        grad_BCHW = grad_BCHW.contiguous(memory_format=torch.channels_last)
        images_BCHW = grad_BCHW.new_empty((batch, 2 * height, 2 * width, channels)).permute(0, 3, 1, 2)
        torch.library.wrap_triton(max_pool_backward)[grid(grad_BCHW)](
            grad_BCHW, places_BCHW, images_BCHW, channels, height, width, grad_BCHW.numel(), BLOCK=BLOCK
        )
        return images_BCHW

    def keep(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    def grads(ctx: Any, grad_BCHW: Tensor, _places: Tensor | None) -> Tensor:
        images_BCHW: Tensor = backward(grad_BCHW, *ctx.saved_tensors)
        return images_BCHW

    max_pool.register_autograd(grads, setup_context=keep)
    _are_registered = True
