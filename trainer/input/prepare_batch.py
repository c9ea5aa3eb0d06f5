"""Prepare a loader's batch for a training step, on the model's device: copy, augment, normalize and mix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bigbatch.trainer.config.sections import ComputeConfig
from bigbatch.trainer.input.base import Batch


def memory_format(compute: ComputeConfig) -> torch.memory_format:
    return torch.channels_last if compute.channels_last else torch.contiguous_format


def on_device(table: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return a host table as a tensor on device; uses pinned memory, else the copy would wait for a GPU."""
    tensor = torch.as_tensor(table)
    must_pin = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if must_pin else tensor).to(device, non_blocking=True)


FIRST_BATCHES = 8
"""Number of microbatches to check."""
FARTHEST_MEAN = 1.0
STD_RANGE = (0.5, 2.0)
"""Limits of a channel's mean and standard deviation; beyond them the input is not normalised. Dark and bright images
stay within; bytes, and values from 0 to 1 that were not normalised, do not."""


class InputStatistics:
    """Sums the first FIRST_BATCHES microbatches by channel, on their device, without a host sync."""

    def __init__(self) -> None:
        self.num_left = FIRST_BATCHES
        """Microbatches to count."""
        self._sums_3C: Tensor | None = None
        """Sums of values, sums of squares, and numbers of values, by channel."""

    def add(self, images_BCHW: Tensor) -> None:
        """Count a normalised microbatch, one of the first."""
        self.num_left -= 1
        # reductions read the images in their own dtype: a copy in fp64 would be the largest tensor of a run
        others = [dim for dim in range(images_BCHW.dim()) if dim != 1]  # features of a vector are its channels
        sum_C = images_BCHW.sum(others, dtype=torch.float32)
        norm_C = torch.linalg.vector_norm(images_BCHW, dim=others, dtype=torch.float32)
        count_C = torch.full_like(sum_C, images_BCHW[:, 0].numel())
        sums_3C = torch.stack([sum_C, norm_C.square(), count_C]).double()
        self._sums_3C = sums_3C if self._sums_3C is None else self._sums_3C + sums_3C

    def hint(self, *, mean: Sequence[float], std: Sequence[float]) -> str | None:
        """Return, once, a hint if channels are far from normalised; None until all of the first batches were added.

        mean, std: those by which the images were normalised. Waits for the device.
        """
        if self.num_left or self._sums_3C is None:
            return None
        sums, squares, counts = self._sums_3C.tolist()
        self._sums_3C = None
        means = [total / count for total, count in zip(sums, counts, strict=True)]
        stds = [
            max(0.0, square / count - each**2) ** 0.5
            for square, count, each in zip(squares, counts, means, strict=True)
        ]
        low, high = STD_RANGE
        # not "<": NaN is far off, too
        if all(abs(each) <= FARTHEST_MEAN for each in means) and all(low <= each <= high for each in stds):
            return None
        own_mean = [each * scale + shift for each, scale, shift in zip(means, std, mean, strict=True)]
        own_std = [each * scale for each, scale in zip(stds, std, strict=True)]
        return (
            f"the model's input is far from normalised: by channel its mean is {_shown(means)} and its standard "
            f"deviation {_shown(stds)} in the first {FIRST_BATCHES} microbatches, not 0 and 1; these images need "
            f"--data.mean '[{_shown(own_mean)}]' --data.std '[{_shown(own_std)}]'"
        )


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


class Normalize:
    """Moves uint8 images to the device, then subtracts the channel means and divides by the deviations.

    mean and std are on the scale 0 to 1. The copy to the device is of bytes, not floats. Without a
    memory_format, the images keep theirs, which is channels-last.
    """

    def __init__(
        self,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        dtype: torch.dtype,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._memory_format = memory_format
        # (x / 255 - m) / s as x * scale + shift: one kernel for a batch
        self._scale = torch.tensor([1 / (255 * s) for s in std], device=device).view(1, 3, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).view(1, 3, 1, 1)

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Return images in the compute dtype, on the device."""
        pixels = images_BCHW.to(self._device, non_blocking=True)
        return torch.addcmul(self._shift, pixels, self._scale).to(self._dtype, memory_format=self._memory_format)


@dataclass(frozen=True)
class Prepared:
    """Images in the compute dtype, class indices, and targets: the indices or, after mixing, class shares (B, K)."""

    images_BCHW: Tensor
    labels_B: Tensor
    targets: Tensor


@dataclass(kw_only=True, eq=False)
class PrepareBatch:
    """Copies a batch to the device as bytes, then augments, normalises and mixes it; no host sync.

    augment: trainer.augment's Augment, of bytes. mix: its Mix, of normalised images.
    """

    normalize: Callable[[Tensor], Tensor]
    device: torch.device
    augment: Callable[..., Tensor] | None = None
    mix: Callable[..., tuple[Tensor, Tensor]] | None = None
    statistics: InputStatistics = field(default_factory=InputStatistics, init=False)

    def copy(self, batch: Batch) -> Tensor:
        """Return the images on the device, uint8."""
        return batch.images_BCHW.to(self.device, non_blocking=True)

    def __call__(self, batch: Batch) -> Prepared:
        epoch, indices_B = batch.request.epoch, batch.request.indices_B
        images_BCHW = self.copy(batch)
        labels_B = on_device(batch.labels_B, self.device)
        if self.augment is not None:
            images_BCHW = self.augment(images_BCHW, epoch=epoch, indices_B=indices_B)
        # augmentations take bytes, mixing takes normalised images: hence the order
        images_BCHW = self.normalize(images_BCHW)
        if self.statistics.num_left:
            self.statistics.add(images_BCHW)
        if self.mix is None:
            return Prepared(images_BCHW, labels_B, labels_B)
        images_BCHW, targets_BK = self.mix(images_BCHW, labels_B, epoch=epoch, indices_B=indices_B)
        return Prepared(images_BCHW, labels_B, targets_BK)
