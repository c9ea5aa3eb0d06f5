"""MixUp and CutMix within ghost batches, so that any world size and accumulation mixes the same pairs.

Each sample is mixed with the one before it in its ghost batch, the first with the last. lam and box are drawn by
a hash of (seed, epoch, the ghost batch's first sample).
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bigbatch.trainer.augment.crops import uniforms

STREAM = 4
"""Stream of mixing's draws, for a ghost batch's first sample; the other augmentations have lower numbers."""


def symmetric_beta(draws_G2: np.ndarray, *, alpha: float) -> np.ndarray:
    """Map pairs of uniform draws in [0, 1) to draws (G) from Beta(alpha, alpha): exact for alpha > 0, no rejection.

    Draws T of Student's distribution with 2 * alpha degrees of freedom by the polar method, and returns
    1/2 + T / (2 * sqrt(2 * alpha + T^2)). Sources: Bailey 1994 (Math. Comp. 62), Devroye 1996 (WSC).
    """
    radius_G = (1 - draws_G2[:, 0]) ** (1 / alpha)  # in (0, 1], or 0 by underflow
    cosine_G = np.cos(2 * math.pi * draws_G2[:, 1])
    rest_G = 1 - radius_G
    return 0.5 + 0.5 * cosine_G * np.sqrt(rest_G) / np.sqrt(radius_G + cosine_G**2 * rest_G)


def cutmix_box(*, lam: float, centre: tuple[float, float], height: int, width: int) -> tuple[int, int, int, int]:
    """Return x1, y1, x2, y2 of a box of about 1 - lam of the image's area around centre (draws for x, y), clipped.

    Source: Yun et al. 2019 (arXiv 1905.04899), as torchvision's CutMix rounds it.
    """
    # half of a side, as a share: the area is the square of the whole side
    reach = 0.5 * math.sqrt(1 - lam)
    x, y = int(centre[0] * width), int(centre[1] * height)
    wide, high = int(reach * width), int(reach * height)
    return max(x - wide, 0), max(y - high, 0), min(x + wide, width), min(y + high, height)


class Mix:
    """Mixes normalised images and their labels: each ghost batch by MixUp or CutMix, drawn with equal chance.

    An alpha of 0 leaves one out. Sources: Zhang et al. 2018 (arXiv 1710.09412), Yun et al. 2019 (arXiv 1905.04899).
    """

    def __init__(
        self, *, seed: int, num_classes: int, bn_span: int, mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0
    ) -> None:
        from torchvision.transforms.v2 import CutMix, MixUp  # a slow import (1 s) that only mixing needs

        self._seed = seed
        self._num_classes = num_classes
        self._bn_span = bn_span
        self._mixup_alpha = mixup_alpha
        self._cutmix_alpha = cutmix_alpha
        self._mixup = MixUp()
        self._cutmix = CutMix()

    def __call__(
        self, images_BCHW: Tensor, labels_B: Tensor, *, epoch: int, indices_B: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return mixed images in the memory format of images_BCHW, and float32 class probabilities (B, num_classes).

        The batch consists of whole ghost batches.
        """
        targets_BK = one_hot(labels_B, self._num_classes).float()
        mixed_BCHW, mixed_BK = torch.empty_like(images_BCHW), torch.empty_like(targets_BK)
        draws_G5 = uniforms(
            seed=self._seed, epoch=epoch, indices_B=indices_B[:: self._bn_span], num_draws=5, stream=STREAM
        )
        for ghost, draws_5 in enumerate(draws_G5):
            part = slice(ghost * self._bn_span, (ghost + 1) * self._bn_span)
            mixed_BCHW[part], mixed_BK[part] = self._mix_ghost(images_BCHW[part], targets_BK[part], draws_5=draws_5)
        return mixed_BCHW, mixed_BK

    def _mix_ghost(self, images_BCHW: Tensor, targets_BK: Tensor, *, draws_5: np.ndarray) -> tuple[Tensor, Tensor]:
        """Mix one ghost batch. draws_5: one chooses the method, two give lam, two the centre of the box."""
        share_of_mixup = self._mixup_alpha and (0.5 if self._cutmix_alpha else 1.0)
        # torchvision's arithmetic with our parameters: it would draw its own from torch's global generator
        params = {"labels": targets_BK, "batch_size": len(targets_BK)}
        if draws_5[0] < share_of_mixup:
            lam = symmetric_beta(draws_5[None, 1:3], alpha=self._mixup_alpha).item()
            # lam of the image is lam of the label, and the order of dimensions does not matter
            images_BHWC = self._mixup.transform(images_BCHW.permute(0, 2, 3, 1), params | {"lam": lam})
            return images_BHWC.permute(0, 3, 1, 2), self._mixup.transform(targets_BK, params | {"lam": lam})
        lam = symmetric_beta(draws_5[None, 1:3], alpha=self._cutmix_alpha).item()
        height, width = images_BCHW.shape[2:]
        centre = (float(draws_5[3]), float(draws_5[4]))
        x1, y1, x2, y2 = box = cutmix_box(lam=lam, centre=centre, height=height, width=width)
        # the border may have cut the box: labels are mixed by the area that is left
        params |= {"box": box, "lam_adjusted": 1 - (x2 - x1) * (y2 - y1) / (width * height)}
        return self._cutmix.transform(images_BCHW, params), self._cutmix.transform(targets_BK, params)
