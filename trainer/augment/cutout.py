"""Cutout: erase a square of each image. Source: DeVries and Taylor 2017 (arXiv 1708.04552)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bigbatch.trainer.config.sections import AugmentConfig
from bigbatch.trainer.input.prepare_batch import on_device


@dataclass(frozen=True)
class Cutout:
    """Fills a square of size // 2 pixels to each side of a uniformly drawn pixel, clipped to the image.

    size: in pixels, even. The paper zeroes normalised pixels: so fill is the data set's mean colour in bytes, 255 * the
    mean that Normalize subtracts, not black. Raises: ValueError naming the senseless setting.
    """

    size: int
    fill: tuple[int, ...]
    stream: ClassVar[int] = 3
    num_draws: ClassVar[int] = 2
    """Row and column."""

    def __post_init__(self) -> None:
        if self.size < 0 or self.size % 2:
            raise ValueError(f"size={self.size} must be even and at least 0")
        if len(self.fill) != 3 or not all(0 <= value <= 255 for value in self.fill):
            raise ValueError(f"fill={self.fill} must be three values between 0 and 255")

    @classmethod
    def asked_for(cls, augment: AugmentConfig, *, fill: tuple[int, ...]) -> "Cutout | None":
        """Return the cutout of a config, or None without one."""
        return cls(augment.cutout_size, fill) if augment.cutout_size else None

    def __call__(self, images_BCHW: Tensor, *, draws_BD: np.ndarray) -> Tensor:
        """Change uint8 images by draws that are uniform in [0, 1)."""
        device = images_BCHW.device
        height, width = images_BCHW.shape[2:]
        centres_2B = np.floor(draws_BD.T * np.array([[height], [width]])).astype(np.int64)
        rows, columns = on_device(centres_2B, device).view(2, -1, 1, 1, 1)
        half = self.size // 2

        def within(positions: Tensor, centres: Tensor) -> Tensor:
            return (positions >= centres - half) & (positions < centres + half)

        hole_BHW1 = within(torch.arange(height, device=device).view(-1, 1, 1), rows) & within(
            torch.arange(width, device=device).view(-1, 1), columns
        )
        colour_C = on_device(np.array(self.fill, np.uint8), device)
        # worked on as BHWC, so that the result is channels-last in memory
        return torch.where(hole_BHW1, colour_C, images_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
