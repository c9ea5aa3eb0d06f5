"""Augmentations of other packages, by import path, tried on random images before the first step."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigbatch.errors import ConfigError
from bigbatch.trainer.augment.crops import uniforms
from bigbatch.trainer.config.dotted import as_line, make_own
from bigbatch.trainer.config.optimizer import named_entries

FIRST_STREAM = 1 << 32
"""Streams of random draws from here on belong to augmentations of other packages, by the CRC-32 of their names."""
NUM_TEST_IMAGES = 4
"""Number of test images; even, because halves are tested too."""


@dataclass(frozen=True)
class OwnAugmentation:
    """Augmentation of another package; its name decides its random stream."""

    name: str
    num_draws: int
    change: Callable[..., Tensor]

    @property
    def stream(self) -> int:
        """Return the number of its random stream."""
        return FIRST_STREAM + zlib.crc32(self.name.encode())

    def __call__(self, images_BCHW: Tensor, *, draws_BD: np.ndarray) -> Tensor:
        """Change uint8 images by draws that are uniform in [0, 1)."""
        return self.change(images_BCHW, draws_BD=draws_BD).contiguous(memory_format=torch.channels_last)


def make_own_augmentations(
    entries: Mapping[str, Any], *, device: torch.device | str, image_size: int
) -> list[OwnAugmentation]:
    """Make and try the augmentations of augment.custom, in order. Raises: ConfigError in one line for an unfit one."""
    found = []
    for name, path, options in named_entries(entries):
        key = f"augment.custom: {name}={path}"
        change = make_own(path, key=key, methods=("__call__",), options=options)
        num_draws = getattr(change, "num_draws", None)
        if not isinstance(num_draws, int) or isinstance(num_draws, bool) or num_draws < 0:
            raise ConfigError(f"{key}: needs an attribute num_draws, the number of random draws for each image")
        augmentation = OwnAugmentation(name, num_draws, change)
        _try(augmentation, key=key, device=device, image_size=image_size)
        found.append(augmentation)
    return found


def _try(augmentation: OwnAugmentation, *, key: str, device: torch.device | str, image_size: int) -> None:
    shape = (NUM_TEST_IMAGES, image_size, image_size, 3)
    pixels_BHWC = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    images_BCHW = torch.from_numpy(pixels_BHWC).to(device).permute(0, 3, 1, 2)
    indices_B = np.arange(NUM_TEST_IMAGES)
    draws_BD = uniforms(
        seed=0, epoch=0, indices_B=indices_B, num_draws=augmentation.num_draws, stream=augmentation.stream
    )
    try:
        with torch.random.fork_rng([images_BCHW.device] if images_BCHW.device.type == "cuda" else []):
            whole = augmentation.change(images_BCHW.clone(), draws_BD=draws_BD)
            halves = [
                augmentation.change(images_BCHW[half].clone(), draws_BD=draws_BD[half])
                for half in (slice(0, NUM_TEST_IMAGES // 2), slice(NUM_TEST_IMAGES // 2, NUM_TEST_IMAGES))
            ]
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"{key}: fails on images of shape {tuple(images_BCHW.shape)}: {as_line(error)}") from error
    if not isinstance(whole, Tensor) or whole.shape != images_BCHW.shape or whole.dtype != torch.uint8:
        given = f"{tuple(whole.shape)} {whole.dtype}" if isinstance(whole, Tensor) else type(whole).__name__
        raise ConfigError(f"{key}: returns {given} for uint8 images of shape {tuple(images_BCHW.shape)}")
    if not torch.equal(whole, torch.cat(halves)):
        raise ConfigError(
            f"{key}: changes an image otherwise in a batch with other images: use draws_BD alone for random numbers, "
            "and no state"
        )
