"""From a loader's batch to what a training step takes, on the model's device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.normalization import InputStatistics
from bigbatch.trainer.input.on_device import on_device


@dataclass(frozen=True)
class Prepared:
    """Holds pictures in the compute dtype, class indices, and targets: the indices, or shares (B, K) after mixing."""

    images_BCHW: Tensor
    labels_B: Tensor
    targets: Tensor


class AugmentFunction(Protocol):
    """Turns uint8 pictures on the device into others."""

    def __call__(self, images_BCHW: Tensor, *, epoch: int, indices_B: np.ndarray) -> Tensor: ...


class MixFunction(Protocol):
    """Turns normalised pictures and their labels into mixed ones and shares (B, K)."""

    def __call__(
        self, images_BCHW: Tensor, labels_B: Tensor, *, epoch: int, indices_B: np.ndarray
    ) -> tuple[Tensor, Tensor]: ...


class PrepareBatch:
    """Copies to the device as bytes, augments, normalises, mixes; no host sync."""

    def __init__(
        self,
        *,
        normalize: Callable[[Tensor], Tensor],
        device: torch.device,
        augment: AugmentFunction | None = None,
        mix: MixFunction | None = None,
    ) -> None:
        self.statistics = InputStatistics()
        self._normalize = normalize
        self._device = device
        self._augment = augment
        self._mix = mix

    def copy(self, batch: Batch) -> Tensor:
        """Return the pictures on the device, uint8."""
        return batch.images_BCHW.to(self._device, non_blocking=True)

    def __call__(self, batch: Batch) -> Prepared:
        epoch, indices_B = batch.request.epoch, batch.request.indices_B
        images_BCHW = self.copy(batch)
        labels_B = on_device(batch.labels_B, self._device)
        if self._augment is not None:
            images_BCHW = self._augment(images_BCHW, epoch=epoch, indices_B=indices_B)
        # augmentations take bytes, mixing takes normalised pictures: hence the order
        images_BCHW = self._normalize(images_BCHW)
        self.statistics.add(images_BCHW)
        if self._mix is None:
            return Prepared(images_BCHW, labels_B, labels_B)
        images_BCHW, targets_BK = self._mix(images_BCHW, labels_B, epoch=epoch, indices_B=indices_B)
        return Prepared(images_BCHW, labels_B, targets_BK)
