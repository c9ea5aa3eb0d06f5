"""Settings of torch's compiler that search for faster kernels, each beside the settings of a run.

A residual block's forward and backward are compiled with GPU_OPTIONS of trainer/models/regions.py, and with more
settings. Lowered for an H200 (tests/support/lowered_gpu.py), searches leave launches and bytes as they are. On a GPU
the name of a comparison ends with the seconds that compiling took. On a CPU nothing is compiled: torch only checks
each setting.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.prototypes.common import Comparison, Prototype, Values, compiled_as_today, main
from bigbatch.trainer.models.norm import GhostBatchNorm2d
from bigbatch.trainer.models.resnet import ResidualBlock, bottleneck
from bigbatch.trainer.step.precision import to_half_

WIDTH, SIDE = 64, 56
"""Channels and side of layer1.1, a block of ResNet-50's first stage."""
BYTES = 36
LAUNCHES = 25
"""Lowered for 256 images, one ghost batch: bytes per element of the result, launches; without convolutions."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "coordinate descent": {"coordinate_descent_tuning": True},
    "autotuned": {"max_autotune_pointwise": True},
    "both": {"max_autotune_pointwise": True, "coordinate_descent_tuning": True},
}
"""Name -> settings beside GPU_OPTIONS."""
BATCH = 256
"""At one batch size, all fit two minutes of a GPU: each setting compiles for half a minute."""


def block_and_images(batch: int, device: torch.device, *, width: int, side: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Make a block in training mode, its input, and the gradient of its result."""
    torch.manual_seed(0)
    norm = partial(GhostBatchNorm2d, bn_span=batch, ghosts_per_step=1)
    block = ResidualBlock(4 * width, bottleneck(width, 1), norm=norm, blurpool=False)
    block = block.to(device).to(memory_format=torch.channels_last).train()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    to_half_(block, dtype)
    images_BCHW, grad_BCHW = (torch.randn(batch, 4 * width, side, side, device=device).to(dtype) for _ in range(2))
    images_BCHW, grad_BCHW = (each.to(memory_format=torch.channels_last) for each in (images_BCHW, grad_BCHW))
    return block, images_BCHW.relu().requires_grad_(), grad_BCHW


def gradients(region: Callable[[Tensor], Tensor], block: nn.Module, images: Tensor, grad: Tensor) -> Values:
    """Compute a block's result and all gradients."""
    result = region(images)
    named = {"images": images, **dict(block.named_parameters())}
    grads = torch.autograd.grad(result, list(named.values()), grad)
    return {"result": result.detach(), **dict(zip(named, grads, strict=True))}


def comparisons(device: torch.device, is_small: bool) -> Iterator[Comparison]:
    """Compare every setting on BATCH images, or on small ones."""
    batch, width, side = (4, 8, 6) if is_small else (BATCH, WIDTH, SIDE)
    block, *tensors = block_and_images(batch, device, width=width, side=side)
    wide = copy.deepcopy(block).double()
    wide_tensors = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]
    exact = cache(partial(gradients, wide, wide, *wide_tensors))  # takes longer than all the rest
    today = partial(gradients, compiled_as_today(block.forward, device), block, *tensors)
    today()
    for name, settings in SETTINGS.items():
        new = partial(gradients, compiled_as_today(block.forward, device, **settings), block, *tensors)
        start = time.perf_counter()
        new()
        seconds = f", compiled in {time.perf_counter() - start:.0f} s" if device.type == "cuda" else ""
        yield Comparison(
            name=f"{name}, {batch} images{seconds}",
            today=today,
            new=new,
            exact=exact,
            elements=tensors[1].numel(),
            today_bytes=BYTES,
            new_bytes=BYTES,
            today_launches=LAUNCHES,
            new_launches=LAUNCHES,
        )


PROTOTYPE = Prototype(
    name="settings",
    item=4,
    change="settings of torch's compiler that search for faster kernels",
    expected_ms=(1.5, 2.5),
    comparisons=comparisons,
)

if __name__ == "__main__":
    main(PROTOTYPE)
