"""Augment uint8 microbatches on the model's device, after a loader has cropped, resized and flipped.

Every draw is a hash of (seed, epoch, sample index), made on the host: the same for every loader, batch and rank.
CONTRIBUTING.md lists the files to change for a new augmentation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bigbatch.parts import load
from bigbatch.trainer.augment.crops import uniforms
from bigbatch.trainer.config.sections import AugmentConfig

Fill = tuple[int, ...]
"""Colour of erased pixels, in bytes."""


class Augmentation(Protocol):
    """Changes uint8 images, on their device and without a host sync, by draws in [0, 1) for each sample."""

    @property
    def num_draws(self) -> int:
        """Return the number of draws for each sample."""

    @property
    def stream(self) -> int:
        """Return the number of its random stream. Never change it: that would change the images of every run."""

    def __call__(self, images_BCHW: Tensor, *, draws_BD: np.ndarray) -> Tensor:
        """Return the changed images; new memory, channels-last."""


AUGMENTATIONS: dict[str, tuple[str, Callable[[AugmentConfig, Fill], tuple[Any, ...]]]] = {
    "color_jitter": (
        "bigbatch.trainer.augment.color_jitter.ColorJitter",
        lambda augment, fill: (augment.color_jitter,),
    ),
    "randaugment_ops": (
        "bigbatch.trainer.augment.rand_augment.RandAugment",
        lambda augment, fill: (augment.randaugment_ops, augment.randaugment_magnitude or 0),
    ),
    "trivial_augment": ("bigbatch.trainer.augment.rand_augment.TrivialAugment", lambda augment, fill: ()),
    "cutout_size": ("bigbatch.trainer.augment.cutout.Cutout", lambda augment, fill: (augment.cutout_size, fill)),
    "erasing_probability": (
        "bigbatch.trainer.augment.cutout.RandomErasing",
        lambda augment, fill: (augment.erasing_probability, fill),
    ),
}
"""Key of the config that switches an augmentation on -> its import path, and its arguments; in their order.

Stream 0 belongs to crop and flip, 4 to mixing."""
CUSTOM = "bigbatch.trainer.augment.own.make_own_augmentations"


@dataclass(frozen=True)
class Augment:
    """Applies augmentations in order."""

    seed: int
    chain: tuple[Augmentation, ...]

    def __call__(self, images_BCHW: Tensor, *, epoch: int, indices_B: np.ndarray) -> Tensor:
        """Return new images in the memory format of images_BCHW."""
        for change in self.chain:
            draws_BD = uniforms(
                seed=self.seed, epoch=epoch, indices_B=indices_B, num_draws=change.num_draws, stream=change.stream
            )
            images_BCHW = change(images_BCHW, draws_BD=draws_BD)
        return images_BCHW


def make_augment(
    augment: AugmentConfig, *, seed: int, fill: Fill, device: torch.device | str = "cpu", image_size: int = 32
) -> Augment | None:
    """Return the augmentations of a config; None without any. fill: the data set's mean colour.

    device, image_size: those on which augmentations of other packages are tried. Raises: ConfigError.
    """
    chain = [
        load(path)(*arguments(augment, fill))
        for key, (path, arguments) in AUGMENTATIONS.items()
        if getattr(augment, key)
    ]
    if augment.custom:
        chain += load(CUSTOM)(augment.custom, device=device, image_size=image_size)
    return Augment(seed, tuple(chain)) if chain else None
