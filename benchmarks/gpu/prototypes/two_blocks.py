"""Residual blocks of one stage compiled as one region, instead of one region per block.

The gradient of a block's input is the sum of two branches, which the reduction of the block before could compute
instead of reading it. As lowered, torch's compiler gains nothing from seeing both blocks: it sums the branches again at
each of three uses, and reads ReLU's sign from y, of two bytes, instead of a mask of one. Two blocks move 76 bytes per
element instead of 72, in 65 launches instead of 66. Stored once, by force_stride_order, the sum is a kernel of its own:
78 bytes. A GPU says what that costs; block_end has the sum inside the reduction by a kernel of its own.
Lowered for four ghost batches: tests/support/lowered_gpu.py layer1.1 layer1.1+layer1.2. Convolutions are not counted.
"""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.prototypes.common import Comparison, Prototype, Values, compiled_as_today, main
from bigbatch.trainer.models.norm import GhostBatchNorm2d
from bigbatch.trainer.models.regions import compile_region
from bigbatch.trainer.models.resnet import ResidualBlock, bottleneck
from bigbatch.trainer.step.precision import to_half_

ONE = (33, 36.0)
"""Launches of one block alone, forward and backward, and bytes per element of its input."""
BORDER = (-1, 4.0)
"""What a border inside a region adds."""


def residual_blocks(
    images: int, channels: int, side: int, *, num: int, ghosts: int, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Make equal residual blocks in training mode, their input, and the gradient of their result."""
    torch.manual_seed(0)
    norm = partial(GhostBatchNorm2d, bn_span=images // ghosts, ghosts_per_step=ghosts)
    layers = bottleneck(channels // 4, 1)
    blocks = nn.Sequential(*(ResidualBlock(channels, layers, norm=norm, blurpool=False) for _ in range(num)))
    to_half_(blocks.to(device).to(memory_format=torch.channels_last).train(), dtype)
    drawn = (torch.randn(images, channels, side, side, device=device).to(dtype) for _ in range(2))
    x, grad = (each.contiguous(memory_format=torch.channels_last) for each in drawn)
    return blocks, x, grad


class Blocks:
    """Equal residual blocks, a batch, and its gradient."""

    def __init__(self, images: int, channels: int, side: int, *, num: int, ghosts: int, device: torch.device) -> None:
        shape = (images, channels, side)
        blocks, self.x, self.grad = residual_blocks(*shape, num=num, ghosts=ghosts, dtype=torch.bfloat16, device=device)
        self.x.requires_grad_()
        self.joined, self.alone = blocks, deepcopy(blocks)
        self.as_fp64 = deepcopy(blocks).double()
        for region in (self.joined, *self.alone):
            compile_(region, device)

    def values(self, blocks: nn.Sequential) -> Values:
        """Return the output, and gradients of the input and of the first weight."""
        weight = blocks[0].get_parameter("conv1.weight")
        x = self.x.to(weight.dtype)
        y: Tensor = blocks(x)
        gradients = torch.autograd.grad(y, (x, weight), self.grad.to(weight.dtype))
        return dict(zip(("y", "x", "weight"), (y.detach(), *gradients), strict=True))


def compile_(region: Any, device: torch.device) -> None:
    """Compile in place; on a CPU only as far as autograd's graphs, because its C++ takes minutes."""
    if device.type == "cuda":
        region.forward = compiled_as_today(region.forward, device)
    else:
        region.forward = compile_region(region.forward, backend="aot_eager")


def comparisons(device: torch.device, is_small: bool) -> Iterator[Comparison]:
    """Compare two blocks of the first stage, and the five last ones of the third."""
    small = ((4, 32, 4, 2, 2),)
    large = ((256, 256, 56, 2, 1), (32, 256, 56, 2, 1), (256, 1024, 14, 5, 4))
    for images, channels, side, num, ghosts in small if is_small else large:
        blocks = Blocks(images, channels, side, num=num, ghosts=ghosts, device=device)
        yield Comparison(
            name=f"{num} blocks, {images} images of {channels} x {side} x {side}, ghosts {ghosts}",
            today=partial(blocks.values, blocks.alone),
            new=partial(blocks.values, blocks.joined),
            exact=partial(blocks.values, blocks.as_fp64),
            elements=blocks.x.numel(),
            today_bytes=num * ONE[1],
            new_bytes=num * ONE[1] + (num - 1) * BORDER[1],
            today_launches=num * ONE[0],
            new_launches=num * ONE[0] + (num - 1) * BORDER[0],
        )


if __name__ == "__main__":
    main(
        Prototype(
            name="two_blocks",
            item=6,
            change="neighbouring residual blocks compiled as one region",
            expected_ms=(-1.2, -1.0),  # 4 bytes more for each of 1.03e9 elements of a step's inner borders
            comparisons=comparisons,
        )
    )
