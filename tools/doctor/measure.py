"""Measure outside of a step: options that are always on, operations per image, and the device's peak rate."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from bigbatch.tools.preflight.rates import make_product, median_seconds
from bigbatch.trainer.build.optimizer import make_optimizer
from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.input.prepare_batch import Prepared
from bigbatch.trainer.machine.host import seconds_of
from bigbatch.trainer.step.plan import Parts
from bigbatch.trainer.step.precision import COMPUTE_DTYPES

MIN_PAIRS = 3
TINY_LR = 1e-6
"""Learning rate at which weights hardly move: arithmetic with very large or small numbers may take another time."""
TINY_GRADIENT = 1e-3
"""Gradient of each weight that has none yet."""
WITH_LOOPS = ("sgd", "adamw")
"""Values of optimizer.name for which torch also has a loop over tensors."""
CONV_BATCH, CONV_CHANNELS, CONV_SIDE = {"cpu": 8, "cuda": 256}, 256, 28
"""A 3 x 3 convolution with many operations per byte."""

Step = Callable[[], object]


def measure_update(settings: OptimizerConfig, parts: Parts, *, seconds: float) -> dict[str, Any]:
    """Return the times of fused and unfused updates of copies; or why there are none. Not collective."""
    if settings.sharded or settings.name not in WITH_LOOPS:
        what = "sharded=True" if settings.sharded else f"name={settings.name}"
        return {"why": f"torch has no form of optimizer.{what} that works tensor by tensor"}
    steps = [make_step(settings, parts, is_fused=is_fused, lr=TINY_LR)[0] for is_fused in (True, False)]
    for step in steps:
        step()  # allocates momenta
    pairs: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < MIN_PAIRS or time.perf_counter() < end:
        pairs.append([seconds_of(step, parts.communicator.device) for step in steps])
    fused, unfused = zip(*pairs, strict=True)
    return {
        "fused_seconds": median(fused),
        "unfused_seconds": median(unfused),
        "times": median(b / a for a, b in pairs),
        "turns": len(pairs),
    }


def make_step(
    settings: OptimizerConfig, parts: Parts, *, is_fused: bool, lr: float
) -> tuple[Step, Mapping[str, Tensor]]:
    """Make an optimizer over copies of the weights that parts.optimizer updates; return its step, and the copies."""
    copies = {}
    for name, master in parts.precision.masters.items():
        copied = copies[name] = master.detach().clone()
        copied.grad = torch.full_like(copied, TINY_GRADIENT) if master.grad is None else master.grad.detach().clone()
    optimizer = make_optimizer(settings, parts.model, copies, lr=lr)
    if not is_fused:
        for group in optimizer.param_groups:
            group |= {"fused": False, "foreach": False}
    return optimizer.step, copies


def measure_pinning(num_bytes: int, device: torch.device, *, seconds: float) -> dict[str, Any]:
    """Return the times of copies from pinned and pageable memory, as the input makes them; or why there are none."""
    if device.type == "cpu":
        return {"why": "nothing is copied: a CPU computes on the memory that images are decoded into"}
    pageable_N = torch.ones(num_bytes, dtype=torch.uint8)
    pinned_N = pageable_N.pin_memory()
    pinned, pageable = (
        median_seconds(partial(each_N.to, device, non_blocking=True), device, seconds=seconds / 2)
        for each_N in (pinned_N, pageable_N)
    )
    return {"bytes": num_bytes, "pinned_seconds": pinned, "pageable_seconds": pageable}


def flops_per_image(parts: Parts, prepared: Prepared) -> float:
    """Count the floating-point operations of forward and backward per image, in matrix products and convolutions only.

    Runs eagerly, without torch.compile and CUDA graphs.
    """
    with FlopCounterMode(display=False) as counter:
        number = backward_of(parts, prepared, num_images=1)
    return counter.get_total_flops() / number


def backward_of(parts: Parts, prepared: Prepared, *, num_images: int) -> int:
    """Run forward and backward of the first images; return their number. No rank waits for another.

    Batch norm uses its running statistics, which fit any number of images. Gradients are None afterwards.
    """
    # gradients of this pass are discarded: they must not travel to other ranks
    parts.reducer.is_active = False
    parts.model.eval()
    with torch.compiler.set_stance("force_eager"), parts.precision.forward():
        logits_BK = parts.model(prepared.images_BCHW[:num_images]).float()
    cross_entropy(logits_BK, prepared.targets[:num_images], reduction="sum").backward()
    parts.model.train()
    parts.reducer.zero_grad()
    return len(logits_BK)


def peak_flops(device: torch.device, *, precision: str, seconds: float) -> float:
    """Return the operations per second of a large matrix product or a large convolution, whichever is faster.

    In that precision, with the threads and TF32 settings of this process.
    """
    dtype = COMPUTE_DTYPES.get(precision.partition("_")[0], torch.float32)
    product, product_flops = make_product(dtype, device)
    product_seconds = median_seconds(product, device, seconds=seconds / 2)
    del product  # its matrices take up to 0.8 GB, beside the parts of a training
    images_BCHW, weight_KCHW = (
        torch.randn(count, CONV_CHANNELS, side, side, dtype=dtype, device=device).to(memory_format=torch.channels_last)
        for count, side in ((CONV_BATCH[device.type], CONV_SIDE), (CONV_CHANNELS, 3))
    )
    with torch.no_grad():
        convolution = median_seconds(lambda: conv2d(images_BCHW, weight_KCHW, padding=1), device, seconds=seconds / 2)
    # a product and a sum for each output, each of its input channels and each of 9 taps
    conv_flops = 2 * images_BCHW.numel() * CONV_CHANNELS * 9
    return max(product_flops / product_seconds, conv_flops / convolution)
