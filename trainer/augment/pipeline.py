"""Augmentation of uint8 microbatches on the model's device, after a loader has cropped, resized and flipped.

Every draw is a hash of (seed, epoch, sample index), made on the host: the same for every loader, batch and rank.
A new augmentation is a file of its own, its class in AUGMENTATIONS, its key in AugmentConfig, and a test.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bigbatch.trainer.augment.color_jitter import ColorJitter
from bigbatch.trainer.augment.crops import uniforms
from bigbatch.trainer.augment.cutout import Cutout
from bigbatch.trainer.augment.rand_augment import RandAugment
from bigbatch.trainer.config.sections import AugmentConfig


class Augmentation(Protocol):
    """Changes each image of a microbatch by draws of its own."""

    @property
    def stream(self) -> int:
        """Number its draws among those of a sample, for ever: another number changes every run's images."""
        ...

    @property
    def num_draws(self) -> int:
        """Say how many it needs of each sample."""
        ...

    def __call__(self, images_BCHW: Tensor, *, draws_BD: np.ndarray) -> Tensor:
        """Change uint8 images, on their device and without a host sync, by draws that are uniform in [0, 1)."""
        ...


AUGMENTATIONS = (ColorJitter, RandAugment, Cutout)
"""All of them, in the order in which they work. Streams 0 and 4 are taken: by crop and flip, and by mixing."""


@dataclass(frozen=True)
class Augment:
    """Applies augmentations one after the other; none leave the images as they are."""

    seed: int
    chain: tuple[Augmentation, ...] = ()

    def __call__(self, images_BCHW: Tensor, *, epoch: int, indices_B: np.ndarray) -> Tensor:
        """Make new images in the memory format of images_BCHW; images_BCHW itself if nothing is asked for.

        Raises: ValueError if images_BCHW are no uint8 RGB images, one per index.
        """
        if images_BCHW.dtype != torch.uint8 or images_BCHW.shape[:2] != (len(indices_B), 3):
            shape = tuple(images_BCHW.shape)
            raise ValueError(
                f"images of {images_BCHW.dtype} and shape {shape}: must be uint8 ({len(indices_B)}, 3, H, W)"
            )
        for change in self.chain:
            draws_BD = uniforms(
                seed=self.seed, epoch=epoch, indices_B=indices_B, num_draws=change.num_draws, stream=change.stream
            )
            images_BCHW = change(images_BCHW, draws_BD=draws_BD)
        return images_BCHW


def make_augment(augment: AugmentConfig, *, seed: int, fill: tuple[int, ...]) -> Augment:
    """Make what a config asks for. fill: the data set's mean colour in bytes, for what wipes out."""
    asked_for = (each.asked_for(augment, fill=fill) for each in AUGMENTATIONS)
    return Augment(seed, tuple(change for change in asked_for if change is not None))
