"""Augmentation of uint8 microbatches on the model's device, after a loader has cropped, resized and flipped.

Every draw is a hash of (seed, epoch, sample index), made on the host: the same for every loader, batch and rank.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from bigbatch.trainer.augment.crops import uniforms
from bigbatch.trainer.augment.rand_augment import MAX_MAGNITUDE, Op, blend, rand_augment, vision
from bigbatch.trainer.input.on_device import on_device


class Stream(IntEnum):
    """Which draws of a sample are for what; the crop and flip of augment.py have stream 0."""

    COLOR_JITTER = 1
    RAND_AUGMENT = 2
    CUTOUT = 3
    MIX = 4


def color_jitter(images_BCHW: Tensor, *, strength: float, draws_B6: np.ndarray) -> Tensor:
    """Brightness, contrast and saturation, each changed by a random factor, in random order per sample.

    The distribution of torchvision's ColorJitter(brightness=strength, contrast=strength, saturation=strength):
    factors uniform in [max(0, 1 - strength), 1 + strength]. Like it, truncates to bytes after each of the three.
    Hue is left out: it needs the way to HSV and back, and torchvision's takes no factor per sample.
    draws_B6 are uniform in [0, 1): three factors, and three keys that sort the changes.
    """
    low = max(0.0, 1 - strength)
    factors_B3 = low + draws_B6[:, :3] * (1 + strength - low)
    for kinds_B in np.argsort(draws_B6[:, 3:], axis=1).T:
        factors_B = factors_B3[np.arange(len(kinds_B)), kinds_B]
        images_BCHW = blend(images_BCHW, ops_B=_JITTERS[kinds_B], factors_B=factors_B)
    return images_BCHW


_JITTERS = np.array([Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR])


def cutout(images_BCHW: Tensor, *, size: int, fill: tuple[int, int, int], draws_B2: np.ndarray) -> Tensor:
    """A square of size // 2 pixels to each side of a uniformly drawn pixel is filled, as far as inside.

    The paper zeroes normalised pixels: so fill is the data set's mean colour in bytes, not black.
    draws_B2 are uniform in [0, 1): row and column. Source: DeVries and Taylor 2017 (arXiv 1708.04552).
    """
    device = images_BCHW.device
    height, width = images_BCHW.shape[2:]
    centres_2B = np.floor(draws_B2.T * np.array([[height], [width]])).astype(np.int64)
    rows, columns = on_device(centres_2B, device).view(2, -1, 1, 1, 1)
    half = size // 2

    def within(positions: Tensor, centres: Tensor) -> Tensor:
        return (positions >= centres - half) & (positions < centres + half)

    hole_BHW1 = within(torch.arange(height, device=device).view(-1, 1, 1), rows) & within(
        torch.arange(width, device=device).view(-1, 1), columns
    )
    colour_C = on_device(np.array(fill, np.uint8), device)
    return torch.where(hole_BHW1, colour_C, images_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Colour jitter, RandAugment and cutout, in that order; a strength, number or size of 0 leaves one out.

    Raises: ValueError naming the senseless setting.
    """

    seed: int
    fill: tuple[int, int, int]
    """Colour of cutout's square in bytes: 255 * the mean that Normalize subtracts."""
    jitter_strength: float = 0.0
    num_ops: int = 0
    """Operations of RandAugment per picture."""
    magnitude: int = 9
    """Of RandAugment, 0 to 30."""
    cutout_size: int = 0
    """Side of cutout's square in pixels, even."""

    def __post_init__(self) -> None:
        if not 0 <= self.jitter_strength < math.inf:
            raise ValueError(f"jitter_strength={self.jitter_strength} must be a number of at least 0")
        if self.num_ops < 0:
            raise ValueError(f"num_ops={self.num_ops} must be at least 0")
        if not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(f"magnitude={self.magnitude} must be between 0 and {MAX_MAGNITUDE}")
        if self.cutout_size < 0 or self.cutout_size % 2:
            raise ValueError(f"cutout_size={self.cutout_size} must be even and at least 0")
        if len(self.fill) != 3 or not all(0 <= value <= 255 for value in self.fill):
            raise ValueError(f"fill={self.fill} must be three values between 0 and 255")
        if self.num_ops or self.jitter_strength:
            vision()  # now, not in the first step

    def __call__(self, images_BCHW: Tensor, *, epoch: int, indices_B: np.ndarray) -> Tensor:
        """New pictures in the memory format of images_BCHW; images_BCHW itself if nothing is asked for.

        Raises: ValueError if images_BCHW are no uint8 RGB pictures, one per index.
        """
        if images_BCHW.dtype != torch.uint8 or images_BCHW.shape[:2] != (len(indices_B), 3):
            shape = tuple(images_BCHW.shape)
            raise ValueError(
                f"images of {images_BCHW.dtype} and shape {shape}: must be uint8 ({len(indices_B)}, 3, H, W)"
            )

        def draws(stream: Stream, count: int) -> np.ndarray:
            return uniforms(seed=self.seed, epoch=epoch, indices_B=indices_B, num_draws=count, stream=stream)

        if self.jitter_strength:
            table_B6 = draws(Stream.COLOR_JITTER, 6)
            images_BCHW = color_jitter(images_BCHW, strength=self.jitter_strength, draws_B6=table_B6)
        if self.num_ops:
            table_BD = draws(Stream.RAND_AUGMENT, 2 * self.num_ops)
            images_BCHW = rand_augment(images_BCHW, num_ops=self.num_ops, magnitude=self.magnitude, draws_BD=table_BD)
        if self.cutout_size:
            table_B2 = draws(Stream.CUTOUT, 2)
            images_BCHW = cutout(images_BCHW, size=self.cutout_size, fill=self.fill, draws_B2=table_B2)
        return images_BCHW
