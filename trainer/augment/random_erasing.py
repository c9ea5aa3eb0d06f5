"""Random erasing: fill a rectangle of some images. Source: Zhong et al. 2017 (arXiv 1708.04896)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from bigbatch.trainer.augment.cutout import fill_boxes, require_colour

AREAS = (0.02, 0.33)
"""Smallest and largest share of the image."""
RATIOS = (0.3, 3.3)
"""Smallest and largest height over width."""
TRIES = 10
"""Rectangles that are drawn until one is smaller than the image; without one, the image stays as it is."""


@dataclass(frozen=True)
class RandomErasing:
    """Fills a rectangle with this probability: area, ratio of its sides (log-uniform) and place are drawn.

    Areas, ratios and tries are those of torchvision's RandomErasing. That erases normalized pixels with 0: so fill is
    the data set's mean colour in bytes. Raises: ValueError naming the senseless setting.
    """

    probability: float
    fill: tuple[int, ...]
    stream: ClassVar[int] = 6
    num_draws: ClassVar[int] = 3 + 2 * TRIES
    """Whether to erase, row, column; area and ratio of each try."""

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability={self.probability} must be between 0 and 1")
        require_colour(self.fill)

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
