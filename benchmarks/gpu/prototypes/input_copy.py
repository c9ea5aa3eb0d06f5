"""Normalization in the copy of images into a captured step's input: bytes in, bf16 out, in one kernel.

Today Normalize computes fp32 images from bytes and rounds them to bf16, and the step copies these to the tensor that
its graph reads: 15 bytes per value in 3 launches. Here one launch moves 3 bytes per value. Calculated at 4.2 TB/s, the
three take 5.7, 6.9 and 4.6 microseconds for 32 images, and the new one 3.4. A step that mixes images needs them
normalized before its graph, as today.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.prototypes.common import Comparison, Kernel, Prototype, Values, main
from bigbatch.trainer.input.prepare_batch import Normalize

BLOCK = 4096
"""Values that one program computes."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@triton.jit
def normalize(  # type: ignore[no-untyped-def]
    pixels, images, num, scale0, scale1, scale2, shift0, shift1, shift2, BLOCK: tl.constexpr
):
    """Write pixels times the scale of their channel, plus its shift; both tensors are channels-last."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num
    channel = index % 3
    scale = tl.where(channel == 0, scale0, tl.where(channel == 1, scale1, scale2))
    shift = tl.where(channel == 0, shift0, tl.where(channel == 1, shift1, shift2))
    value = tl.load(pixels + index, is_there, 0).to(tl.float32)
    # fma rounds once; whether torch.addcmul does, too, the comparison's share of equal values says
    tl.store(images + index, tl.fma(value, scale, shift).to(images.dtype.element_ty), is_there)


def copy_normalized_(images_BCHW: Tensor, pixels_BCHW: Tensor, numbers: list[float]) -> None:
    """Normalize bytes into images_BCHW; numbers: scale and shift of the three channels."""
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in (images_BCHW, pixels_BCHW))
    num = pixels_BCHW.numel()
    normalize[(triton.cdiv(num, BLOCK),)](pixels_BCHW, images_BCHW, num, *numbers, BLOCK=BLOCK, num_warps=8)


def comparison_of(shape: tuple[int, int, int], device: torch.device) -> Comparison:
    """Compare images of (batch, height, width), among them every byte in each channel if they have as many pixels."""
    # Triton's interpreter truncates to bf16, and rounds to fp16
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    batch, height, width = shape
    values_NC = torch.arange(batch * height * width, device=device)[:, None] + 85 * torch.arange(3, device=device)
    pixels_BCHW = (values_NC % 256).byte().view(batch, height, width, 3).permute(0, 3, 1, 2)
    normalized = Normalize(mean=MEAN, std=STD, device=device, dtype=dtype, memory_format=torch.channels_last)
    numbers = [float(each) for values in (normalized._scale, normalized._shift) for each in values.flatten()]
    today_BCHW, new_BCHW = (torch.empty_like(pixels_BCHW, dtype=dtype) for _ in range(2))

    def today() -> Values:
        return {"images": today_BCHW.copy_(normalized(pixels_BCHW))}

    def new() -> Values:
        copy_normalized_(new_BCHW, pixels_BCHW, numbers)
        return {"images": new_BCHW}

    def exact() -> Values:
        mean_C, std_C = (torch.tensor(each, dtype=torch.float64, device=device).view(3, 1, 1) for each in (MEAN, STD))
        return {"images": (pixels_BCHW.double() / 255 - mean_C) / std_C}

    return Comparison(
        name=f"{batch} images of {height} x {width}",
        today=today,
        new=new,
        exact=exact,
        elements=pixels_BCHW.numel(),
        today_bytes=15,
        new_bytes=3,
        today_launches=3,
        new_launches=1,
    )


def comparisons(device: torch.device, is_small: bool) -> Iterator[Comparison]:
    """Compare the microbatches of a step, or small ones."""
    for shape in ((2, 16, 16), (1, 5, 7)) if is_small else ((256, 224, 224), (32, 224, 224)):
        yield comparison_of(shape, device)


NUMBERS = {f"{name}{channel}": "fp32" for name in ("scale", "shift") for channel in range(3)}
ARGUMENTS: dict[str, Any] = {
    "pixels": "*u8:16",
    "images": "*bf16:16",
    "num": "i32:16",
    **NUMBERS,
    "BLOCK": BLOCK,
}
PROTOTYPE = Prototype(
    name="input_copy",
    item=8,
    change="bytes normalized in the copy into a captured step's input",
    expected_ms=(0.2, 0.2),
    comparisons=comparisons,
    kernels=(Kernel(normalize, ARGUMENTS, {"num_warps": 8}),),
)

if __name__ == "__main__":
    main(PROTOTYPE)
