"""RandAugment and TrivialAugment of a whole microbatch on its device, without a wait for the GPU.

Samples are grouped by operation. The operations are drawn on the host, which also makes indices and parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from types import ModuleType
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample

from bigbatch.trainer.input.prepare_batch import on_device

MAX_MAGNITUDE = 30
"""Magnitudes are 0..30: the 31 bins that torchvision's RandAugment and TrivialAugmentWide have by default."""


@cache
def vision() -> ModuleType:
    """Import torchvision's operations: a slow import (1 s) that only augmentation needs."""
    from torchvision.transforms.v2 import functional

    return functional


class Op(IntEnum):
    """Numbers of the 14 operations, in torchvision's order; operations of one family (_FAMILIES) are neighbours."""

    IDENTITY = 0
    SHEAR_X = 1
    SHEAR_Y = 2
    TRANSLATE_X = 3
    TRANSLATE_Y = 4
    ROTATE = 5
    BRIGHTNESS = 6
    COLOR = 7
    CONTRAST = 8
    SHARPNESS = 9
    POSTERIZE = 10
    SOLARIZE = 11
    AUTOCONTRAST = 12
    EQUALIZE = 13


@dataclass(frozen=True)
class Ranges:
    """Amounts of the operations at MAX_MAGNITUDE."""

    shear: float
    translate: Callable[[int], float]
    """(Side of the image in that direction, in pixels) -> pixels."""
    rotate: float
    """Degrees."""
    factor: float
    """Change of the factor of brightness, colour, contrast and sharpness."""
    posterize: int
    """Number of low bits that are cleared."""


MODERATE = Ranges(shear=0.3, translate=lambda side: 150 / 331 * side, rotate=30.0, factor=0.9, posterize=4)
"""Ranges of torchvision's RandAugment."""


@dataclass(frozen=True)
class RandAugment:
    """Applies num_ops operations to each image, each drawn uniformly from Op, all at one magnitude.

    magnitude: 0 to MAX_MAGNITUDE. Operations and ranges are those of torchvision's RandAugment.
    Source: Cubuk et al. 2020 (arXiv 1909.13719).
    """

    num_ops: int
    magnitude: int = 9
    stream: ClassVar[int] = 2

    def __post_init__(self) -> None:
        vision()  # now, not in the first step

    @property
    def num_draws(self) -> int:
        """Return the number of draws per sample: for each operation its kind, and its sign (if it has one)."""
        return 2 * self.num_ops

    def __call__(self, images_BCHW: Tensor, *, draws_BD: np.ndarray) -> Tensor:
        """Change uint8 images by draws that are uniform in [0, 1)."""
        for number in range(self.num_ops):
            ops_B = np.floor(draws_BD[:, 2 * number] * len(Op)).astype(np.int64)
            signs_B = np.where(draws_BD[:, 2 * number + 1] < 0.5, -1.0, 1.0)
            levels_B = np.full(len(ops_B), self.magnitude)
            images_BCHW = apply_ops(images_BCHW, Ops(ops_B, signs_B, levels_B, MODERATE))
        return images_BCHW


@dataclass(frozen=True)
class Ops:
    """One operation per image: kind, sign and magnitude of each, and the ranges of all."""

    ops_B: np.ndarray
    signs_B: np.ndarray
    magnitudes_B: np.ndarray
    ranges: Ranges

    def of(self, members: np.ndarray) -> "Ops":
        """Return the operations of some images."""
        return Ops(self.ops_B[members], self.signs_B[members], self.magnitudes_B[members], self.ranges)

    def levels_B(self, end: float, *, start: float = 0.0) -> np.ndarray:
        """Return each magnitude's amount between start and end, in float32 like torchvision, for equal pixels."""
        return torch.linspace(start, end, MAX_MAGNITUDE + 1).double().numpy()[self.magnitudes_B]


def apply_ops(images_BCHW: Tensor, drawn: Ops) -> Tensor:
    """Return uint8 images after one operation each; each family is computed for its own samples only."""
    ops_B = drawn.ops_B
    order_B = np.argsort(ops_B, kind="stable")
    rows_B = on_device(order_B, images_BCHW.device)
    images_BHWC = images_BCHW.permute(0, 2, 3, 1)  # index_select keeps the order of dimensions, not channels-last
    result_BHWC = images_BHWC.clone()
    for (first, last), transform in _FAMILIES.items():
        start, end = np.searchsorted(ops_B[order_B], (first, last + 1))
        if start == end:
            continue
        members, rows = order_B[start:end], rows_B[start:end]
        family_BCHW = images_BHWC.index_select(0, rows).permute(0, 3, 1, 2)
        changed = transform(family_BCHW, drawn.of(members))
        result_BHWC.index_copy_(0, rows, changed.permute(0, 2, 3, 1))
    return result_BHWC.permute(0, 3, 1, 2)


def blend(images_BCHW: Tensor, *, ops_B: np.ndarray, factors_B: np.ndarray) -> Tensor:
    """Return factor * image + (1 - factor) * other, clamped to 0..255 and truncated, as torchvision's adjust_* do.

    other is black for BRIGHTNESS, the grey image for COLOR (saturation) and its mean for CONTRAST.
    """
    table_4B = np.stack([factors_B, 1 - factors_B, ops_B == Op.COLOR, ops_B == Op.CONTRAST]).astype(np.float32)
    factors, rests, is_color, is_contrast = on_device(table_4B, images_BCHW.device).view(4, -1, 1, 1, 1)
    grey_B1HW = vision().rgb_to_grayscale(images_BCHW)
    # a float64 sum of bytes is exact, so the mean does not depend on how a device orders it
    mean_B111 = grey_B1HW.mean((1, 2, 3), keepdim=True, dtype=torch.float64).float()
    other_B1HW = grey_B1HW * is_color + mean_B111 * is_contrast
    return (images_BCHW * factors).addcmul_(other_B1HW, rests).clamp_(0, 255).to(torch.uint8)


def sampling_matrices(drawn: Ops, *, height: int, width: int) -> np.ndarray:
    """Return the matrices (B, 2, 3) from output pixel (x, y, 1) to input pixel, in pixels from the image's centre.

    Shears keep the top left corner in place, rotations the centre; translations are whole pixels.
    """

    def amounts(op: Op, maximum: float) -> np.ndarray:
        return np.where(drawn.ops_B == op, drawn.signs_B * drawn.levels_B(maximum), 0.0)

    ranges = drawn.ranges
    shear_x, shear_y = amounts(Op.SHEAR_X, ranges.shear), amounts(Op.SHEAR_Y, ranges.shear)
    left = np.trunc(amounts(Op.TRANSLATE_X, ranges.translate(width)))
    down = np.trunc(amounts(Op.TRANSLATE_Y, ranges.translate(height)))
    turn = np.radians(amounts(Op.ROTATE, ranges.rotate))
    rows_x = [np.cos(turn), shear_x - np.sin(turn), shear_x * height / 2 - left]
    rows_y = [shear_y + np.sin(turn), np.cos(turn), shear_y * width / 2 - down]
    return np.stack([np.stack(rows_x, axis=1), np.stack(rows_y, axis=1)], axis=1)


def _column(values_B: np.ndarray, images_BCHW: Tensor) -> Tensor:
    return on_device(values_B, images_BCHW.device).view(-1, 1, 1, 1)


def _moved(images_BCHW: Tensor, drawn: Ops) -> Tensor:
    """Shear, translate or rotate with nearest-pixel sampling; pixels outside are black.

    The grid is made by products and sums, not by affine_grid: its matrix product may round by batch size,
    and with TF32 by about a tenth of a pixel.
    """
    height, width = images_BCHW.shape[2:]
    matrices_B23 = sampling_matrices(drawn, height=height, width=width)
    shares_B23 = matrices_B23 / np.array([[width / 2], [height / 2]])  # grid_sample's unit: half the image
    device = images_BCHW.device
    factors = on_device(shares_B23.astype(np.float32), device)[..., None, None]
    xs_W = torch.arange(width, device=device) - (width - 1) / 2
    ys_H1 = torch.arange(height, device=device)[:, None] - (height - 1) / 2
    grid_B2HW = factors[:, :, 0] * xs_W + (factors[:, :, 1] * ys_H1 + factors[:, :, 2])
    grid_BHW2 = grid_B2HW.permute(0, 2, 3, 1)
    moved = grid_sample(images_BCHW.float(), grid_BHW2, mode="nearest", padding_mode="zeros", align_corners=False)
    return moved.to(torch.uint8)


def _sharpened(images_BCHW: Tensor, drawn: Ops) -> Tensor:
    """Apply torchvision's adjust_sharpness with a factor per sample; torchvision's own waits for a copy to the GPU.

    The blur's weighted sums are whole numbers and never tie when divided by 13, so it is exact everywhere.
    """
    rests = _column((-drawn.signs_B * drawn.levels_B(drawn.ranges.factor)).astype(np.float32), images_BCHW)
    pixels_BCHW = images_BCHW.float()
    inner_BCHW = pixels_BCHW[:, :, 1:-1, 1:-1]
    # weights of 1 around a 5, 13 in all: a plain 3x3 sum, and the centre four times more
    sums_BCHW = avg_pool2d(pixels_BCHW, 3, stride=1, divisor_override=1) + 4 * inner_BCHW
    blurred_BCHW = (sums_BCHW / 13).round_()
    # inner_BCHW is a view: the border of pixels_BCHW stays as it was, as in torchvision
    inner_BCHW.addcmul_(blurred_BCHW - inner_BCHW, rests)
    return pixels_BCHW.clamp_(0, 255).to(torch.uint8)


def _blended(images_BCHW: Tensor, drawn: Ops) -> Tensor:
    factors_B = 1 + drawn.signs_B * drawn.levels_B(drawn.ranges.factor)
    return blend(images_BCHW, ops_B=drawn.ops_B, factors_B=factors_B)


def _posterized(images_BCHW: Tensor, drawn: Ops) -> Tensor:
    """Keep the highest bits of each byte."""
    dropped_B = np.rint(drawn.magnitudes_B / (MAX_MAGNITUDE / drawn.ranges.posterize)).astype(np.uint8)
    return images_BCHW & _column(np.uint8(0xFF) << dropped_B, images_BCHW)


def _solarized(images_BCHW: Tensor, drawn: Ops) -> Tensor:
    """Invert pixels above a threshold, which falls from 255 to 0."""
    thresholds = _column((255 * drawn.levels_B(0.0, start=1.0)).astype(np.float32), images_BCHW)
    return torch.where(images_BCHW >= thresholds, 255 - images_BCHW, images_BCHW)


# (first, last operation) of a family -> function for all its samples at once; the identity needs none
_FAMILIES: dict[tuple[Op, Op], Callable[[Tensor, Ops], Tensor]] = {
    (Op.SHEAR_X, Op.ROTATE): _moved,
    (Op.BRIGHTNESS, Op.CONTRAST): _blended,
    (Op.SHARPNESS, Op.SHARPNESS): _sharpened,
    (Op.POSTERIZE, Op.POSTERIZE): _posterized,
    (Op.SOLARIZE, Op.SOLARIZE): _solarized,
    (Op.AUTOCONTRAST, Op.AUTOCONTRAST): lambda images_BCHW, drawn: vision().autocontrast(images_BCHW),
    (Op.EQUALIZE, Op.EQUALIZE): lambda images_BCHW, drawn: vision().equalize(images_BCHW),
}

WIDE = Ranges(shear=0.99, translate=lambda side: 32.0, rotate=135.0, factor=0.99, posterize=6)
"""Ranges of torchvision's TrivialAugmentWide."""


@dataclass(frozen=True)
class TrivialAugment:
    """Applies one operation to each image; operation, magnitude and sign are drawn uniformly.

    Operations and ranges are those of torchvision's TrivialAugmentWide. Source: Mueller and Hutter 2021 (arXiv
    2103.10158).
    """

    stream: ClassVar[int] = 5
    num_draws: ClassVar[int] = 3
    """Operation, magnitude and sign."""

    def __post_init__(self) -> None:
        vision()  # now, not in the first step

    def __call__(self, images_BCHW: Tensor, *, draws_BD: np.ndarray) -> Tensor:
        """Change uint8 images by draws that are uniform in [0, 1)."""
        ops_B, magnitudes_B = np.floor(draws_BD[:, :2].T * [[len(Op)], [MAX_MAGNITUDE + 1]]).astype(np.int64)
        signs_B = np.where(draws_BD[:, 2] < 0.5, -1.0, 1.0)
        return apply_ops(images_BCHW, Ops(ops_B, signs_B, magnitudes_B, WIDE))
