"""TrivialAugment (wide): one operation for each image, of any magnitude, from RandAugment's operations."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from bigbatch.trainer.augment.rand_augment import MAX_MAGNITUDE, Op, Ops, Ranges, apply_ops, vision

WIDE = Ranges(shear=0.99, translate=lambda side: 32.0, rotate=135.0, factor=0.99, posterize=6)
"""Those of torchvision's TrivialAugmentWide."""


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
