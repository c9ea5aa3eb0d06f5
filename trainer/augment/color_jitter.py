"""Colour jitter: brightness, contrast and saturation change by a random factor each."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from bigbatch.trainer.augment.rand_augment import Op, blend, vision

_JITTERS = np.array([Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR])


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast and saturation, each by a random factor, in random order per sample.

    Has the distribution of torchvision's ColorJitter(brightness=strength, contrast=strength, saturation=strength):
    factors uniform in [max(0, 1 - strength), 1 + strength]. Like it, truncates to bytes after each change.
    Leaves out hue, which needs a conversion to HSV and back; torchvision's takes no factor per sample.
    """

    strength: float
    stream: ClassVar[int] = 1
    num_draws: ClassVar[int] = 6
    """Three factors, and three keys that order the changes."""

    def __post_init__(self) -> None:
        vision()  # now, not in the first step

    def __call__(self, images_BCHW: Tensor, *, draws_BD: np.ndarray) -> Tensor:
        """Change uint8 images by draws that are uniform in [0, 1)."""
        low = max(0.0, 1 - self.strength)
        factors_B3 = low + draws_BD[:, :3] * (1 + self.strength - low)
        # sorting random keys gives each sample a random order; pass k makes the k-th change of all samples
        for kinds_B in np.argsort(draws_BD[:, 3:], axis=1).T:
            factors_B = factors_B3[np.arange(len(kinds_B)), kinds_B]
            images_BCHW = blend(images_BCHW, ops_B=_JITTERS[kinds_B], factors_B=factors_B)
        return images_BCHW
