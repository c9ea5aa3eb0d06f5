"""Loader of generated tensors, to measure a step without reading, decoding and copying."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from bigbatch.trainer.input.base import Batch, ImageSize, Request


class SyntheticLoader:
    """Yields the same random images of a size, made once on the device, for every request; learns nothing."""

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: ImageSize,
        microbatch_size: int,
        device: torch.device | str,
        seed: int = 0,
    ) -> None:
        self._num_classes = num_classes
        self._image_size = image_size
        self._microbatch_size = microbatch_size
        self._device = torch.device(device)
        self._seed = seed
        self._images_by_size: dict[int, Tensor] = {}
        self._is_open = True

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request until the loader is closed; the label is index modulo num_classes.

        Raises: ValueError if a request has not microbatch_size samples.
        """
        for request in requests:
            if not self._is_open:
                return
            if len(request.indices_B) != self._microbatch_size:
                raise ValueError(f"got {len(request.indices_B)} samples, microbatch_size is {self._microbatch_size}")
            yield Batch(
                images_BCHW=self._images(self._image_size(request.epoch)),
                labels_B=torch.from_numpy(request.indices_B % self._num_classes),
                valid_B=torch.from_numpy(request.valid_B),
                request=request,
            )

    def close(self) -> None:
        self._is_open = False

    def _images(self, size: int) -> Tensor:
        if size not in self._images_by_size:
            generator = torch.Generator(self._device).manual_seed(self._seed)
            shape = (self._microbatch_size, size, size, 3)
            images_BHWC = torch.randint(0, 256, shape, dtype=torch.uint8, device=self._device, generator=generator)
            # made as BHWC, so that the memory is channels-last as from the other loaders
            self._images_by_size[size] = images_BHWC.permute(0, 3, 1, 2)
        return self._images_by_size[size]
