"""Measure the arithmetic of an image, and the device's peak rate."""

import torch
from torch.nn.functional import conv2d, cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from bigbatch.trainer.input.prepare_batch import Prepared
from bigbatch.trainer.preflight.rates import Product, median_seconds
from bigbatch.trainer.step.plan import Parts
from bigbatch.trainer.step.precision import COMPUTE_DTYPES

CONV_BATCH, CONV_CHANNELS, CONV_SIDE = {"cpu": 8, "cuda": 256}, 256, 28
"""A convolution of 3 x 3 with plenty to do for each byte."""


def flops_per_image(parts: Parts, prepared: Prepared) -> float:
    """Count the floating-point operations of a forward and a backward of one image: matrices and convolutions alone.

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
    product_flops_per_second = Product(dtype, device).flops_per_second(seconds=seconds / 2)
    images_BCHW, weight_KCHW = (
        torch.randn(count, CONV_CHANNELS, side, side, dtype=dtype, device=device).to(memory_format=torch.channels_last)
        for count, side in ((CONV_BATCH[device.type], CONV_SIDE), (CONV_CHANNELS, 3))
    )
    with torch.no_grad():
        convolution = median_seconds(lambda: conv2d(images_BCHW, weight_KCHW, padding=1), device, seconds=seconds / 2)
    # a product and a sum for each output, each of its input channels and each of 9 taps
    conv_flops = 2 * images_BCHW.numel() * CONV_CHANNELS * 9
    return max(product_flops_per_second, conv_flops / convolution)
