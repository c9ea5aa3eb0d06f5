"""Cutout and random erasing: fill a square of each image, or a rectangle of some.

Sources: DeVries and Taylor 2017 (arXiv 1708.04552); Zhong et al. 2017 (arXiv 1708.04896).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bigbatch.trainer.input.prepare_batch import on_device

AREAS = (0.02, 0.33)
"""Smallest and largest share of the image."""
RATIOS = (0.3, 3.3)
"""Smallest and largest height over width."""
TRIES = 10
"""Rectangles drawn until one is smaller than the image; if none is, the image stays unchanged."""


@dataclass(frozen=True)
class Cutout:
    """Fills a square of size // 2 pixels to each side of a uniformly drawn pixel, clipped to the image.

    size: in pixels, even. fill: the data set's mean colour in bytes (255 * the mean that Normalize subtracts), since
    the paper sets normalised pixels to 0.
    """

    size: int
    fill: tuple[int, ...]
    stream: ClassVar[int] = 3
    num_draws: ClassVar[int] = 2
    """Row and column."""

    def __call__(self, images_BCHW: Tensor, *, draws_BD: np.ndarray) -> Tensor:
        """Change uint8 images by draws that are uniform in [0, 1)."""
        centres_B2 = np.floor(draws_BD * images_BCHW.shape[2:])
        half = self.size // 2
        return fill_boxes(images_BCHW, first_B2=centres_B2 - half, end_B2=centres_B2 + half, fill=self.fill)


@dataclass(frozen=True)
class RandomErasing:
    """Fills, with some probability, a rectangle of random area, ratio of sides (log-uniform) and place.

    Areas, ratios and tries are those of torchvision's RandomErasing. fill: the data set's mean colour in bytes, because
    torchvision sets normalised pixels to 0.
    """

    probability: float
    fill: tuple[int, ...]
    stream: ClassVar[int] = 6
    num_draws: ClassVar[int] = 3 + 2 * TRIES
    """Whether to erase, row, column; area and ratio of each try."""

    def __call__(self, images_BCHW: Tensor, *, draws_BD: np.ndarray) -> Tensor:
        """Change uint8 images by draws that are uniform in [0, 1)."""
        image_2 = np.array(images_BCHW.shape[2:])
        areas_BT = image_2.prod() * _between(*AREAS, draws=draws_BD[:, 3 : 3 + TRIES])
        ratios_BT = np.exp(_between(*map(math.log, RATIOS), draws=draws_BD[:, 3 + TRIES :]))
        sides_BT2 = np.rint(np.sqrt(np.stack([areas_BT * ratios_BT, areas_BT / ratios_BT], axis=-1)))
        fits_BT = (sides_BT2 < image_2).all(-1)
        sides_B2 = np.take_along_axis(sides_BT2, fits_BT.argmax(1)[:, None, None], axis=1)[:, 0]
        sides_B2 *= (fits_BT.any(1) & (draws_BD[:, 0] < self.probability))[:, None]
        corners_B2 = np.floor(draws_BD[:, 1:3] * (image_2 - sides_B2 + 1))
        return fill_boxes(images_BCHW, first_B2=corners_B2, end_B2=corners_B2 + sides_B2, fill=self.fill)


def _between(low: float, high: float, *, draws: np.ndarray) -> np.ndarray:
    return low + draws * (high - low)


def fill_boxes(images_BCHW: Tensor, *, first_B2: np.ndarray, end_B2: np.ndarray, fill: tuple[int, ...]) -> Tensor:
    """Return images with one box each filled: rows and columns in [first, end), clipped to the image."""
    device = images_BCHW.device
    bounds_4B = np.concatenate([first_B2.T, end_B2.T]).astype(np.int64)
    top, left, bottom, right = on_device(bounds_4B, device).view(4, -1, 1, 1, 1)
    rows_H11 = torch.arange(images_BCHW.shape[2], device=device).view(-1, 1, 1)
    columns_W1 = torch.arange(images_BCHW.shape[3], device=device).view(-1, 1)
    box_BHW1 = (rows_H11 >= top) & (rows_H11 < bottom) & (columns_W1 >= left) & (columns_W1 < right)
    colour_C = on_device(np.array(fill, np.uint8), device)
    # computed as BHWC, so that the result is channels-last in memory
    return torch.where(box_BHW1, colour_C, images_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
