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
from benchmarks.gpu.prototypes.two_blocks import residual_blocks

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


def gradients(region: Callable[[Tensor], Tensor], block: nn.Module, images: Tensor, grad: Tensor) -> Values:
    """Compute a block's result and all gradients."""
    result = region(images)
    named = {"images": images, **dict(block.named_parameters())}
    grads = torch.autograd.grad(result, list(named.values()), grad)
    return {"result": result.detach(), **dict(zip(named, grads, strict=True))}


def comparisons(device: torch.device, is_small: bool) -> Iterator[Comparison]:
    """Compare every setting on BATCH images, or on small ones."""
    batch, width, side = (4, 8, 6) if is_small else (BATCH, WIDTH, SIDE)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    (block,), images, grad = residual_blocks(batch, 4 * width, side, num=1, ghosts=1, dtype=dtype, device=device)
    tensors = (images.relu().requires_grad_(), grad)
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
