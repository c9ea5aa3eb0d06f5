"""Augment uint8 microbatches on the model's device, after a loader has cropped, resized and flipped.

Every draw is a hash of (seed, epoch, sample index), made on the host: the same for every loader, batch and rank.
CONTRIBUTING.md lists the files to change for a new augmentation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from bigbatch.trainer.augment.color_jitter import ColorJitter
from bigbatch.trainer.augment.crops import uniforms
from bigbatch.trainer.augment.cutout import Cutout, RandomErasing
from bigbatch.trainer.augment.rand_augment import RandAugment, TrivialAugment
from bigbatch.trainer.config.sections import AugmentConfig

Augmentation: TypeAlias = ColorJitter | RandAugment | TrivialAugment | Cutout | RandomErasing
"""Changes uint8 images, on their device and without a host sync, by num_draws draws in [0, 1) for each sample.

Never change the number of an augmentation's random stream: that would change every run's images."""
AUGMENTATIONS: dict[type[Augmentation], Callable[[AugmentConfig, tuple[int, ...]], Augmentation | None]] = {
    ColorJitter: lambda augment, fill: ColorJitter(augment.color_jitter) if augment.color_jitter else None,
    RandAugment: lambda augment, fill: (
        RandAugment(augment.randaugment_ops, augment.randaugment_magnitude or 0) if augment.randaugment_ops else None
    ),
    TrivialAugment: lambda augment, fill: TrivialAugment() if augment.trivial_augment else None,
    Cutout: lambda augment, fill: Cutout(augment.cutout_size, fill) if augment.cutout_size else None,
    RandomErasing: lambda augment, fill: (
        RandomErasing(augment.erasing_probability, fill) if augment.erasing_probability else None
    ),
}
"""All augmentations, in order, each made from a config, or None. Stream 0 belongs to crop and flip, 4 to mixing."""


@dataclass(frozen=True)
class Augment:
    """Applies augmentations in order; with none, images are unchanged."""

    seed: int
    chain: tuple[Augmentation, ...] = ()

    def __call__(self, images_BCHW: Tensor, *, epoch: int, indices_B: np.ndarray) -> Tensor:
        """Return new images in the memory format of images_BCHW, or images_BCHW itself without augmentations."""
        for change in self.chain:
            draws_BD = uniforms(
                seed=self.seed, epoch=epoch, indices_B=indices_B, num_draws=change.num_draws, stream=change.stream
            )
            images_BCHW = change(images_BCHW, draws_BD=draws_BD)
        return images_BCHW


def make_augment(augment: AugmentConfig, *, seed: int, fill: tuple[int, ...]) -> Augment:
    """Return the augmentations of a config. fill: the data set's mean colour in bytes, for erased pixels."""
    asked_for = (make(augment, fill) for make in AUGMENTATIONS.values())
    return Augment(seed, tuple(change for change in asked_for if change is not None))
