"""Normalize uint8 images to the model's input, on the model's device."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Normalize:
    """Moves uint8 images to the device, then subtracts the channel means and divides by the deviations.

    mean and std are on the scale 0 to 1. Bytes cross to the device, floats do not. Without a
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
