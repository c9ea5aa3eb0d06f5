"""Settings of torch's compiler that search for faster kernels, each beside the settings of a run.

A residual block's forward and backward are compiled with GPU_OPTIONS of trainer/models/regions.py, and with one more
setting. Lowered for an H200 (tests/support/lowered_gpu.py), searches leave launches and bytes as they are, and combined
kernels have three launches less: those that finish a norm's sums, less than 5 microseconds each. On a GPU the name of a
comparison ends with the seconds that compiling took. On a CPU nothing is compiled: torch only checks each setting.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.prototypes.common import Comparison, Prototype, Values, main
from bigbatch.trainer.models.norm import GhostBatchNorm2d
from bigbatch.trainer.models.regions import GPU_OPTIONS
from bigbatch.trainer.models.resnet import ResidualBlock, bottleneck
from bigbatch.trainer.step.precision import to_half_

WIDTH, SIDE = 64, 56
"""Channels and side of layer1.1, a block of ResNet-50's first stage."""
BYTES = 36
LAUNCHES = 25
"""Lowered for 256 images, one ghost batch: bytes per element of the result, launches; without convolutions."""
SETTINGS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "coordinate descent": ({"coordinate_descent_tuning": True}, 25),
    "autotuned": ({"max_autotune_pointwise": True}, 25),
    "both": ({"max_autotune_pointwise": True, "coordinate_descent_tuning": True}, 25),
    "multi-kernel": ({"triton.multi_kernel": 1}, 25),
    "cooperative reductions": ({"triton.cooperative_reductions": True}, 25),
    "combined kernels": ({"combo_kernels": True}, 22),
}
"""Name -> settings beside GPU_OPTIONS, and the launches with them."""


def compiled(region: Callable[..., Any], settings: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Compile a region as a run does, with more settings. Raises: RuntimeError for one that torch does not know."""
    made = torch.compile(region, fullgraph=True, dynamic=False, options={**GPU_OPTIONS, **settings})
    return made if device.type == "cuda" else region


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
    """Compare every setting on 256 and on 32 images, or on small ones."""
    for batch, width, side in [(4, 8, 6)] if is_small else [(256, WIDTH, SIDE), (32, WIDTH, SIDE)]:
        block, *tensors = block_and_images(batch, device, width=width, side=side)
        wide = copy.deepcopy(block).double()
        wide_tensors = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]
        exact = cache(partial(gradients, wide, wide, *wide_tensors))  # takes longer than all the rest
        today = partial(gradients, compiled(block.forward, {}, device), block, *tensors)
        today()
        for name, (settings, launches) in SETTINGS.items():
            new = partial(gradients, compiled(block.forward, settings, device), block, *tensors)
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
                new_launches=launches,
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
