"""Loader of random images, to measure a step without reading, decoding and copying."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.trainer.input.base import Batch, ImageSize, Request


@dataclass(kw_only=True, eq=False)
class SyntheticLoader:
    """Yields the same random images, made once per size on the device, for every request."""

    num_classes: int
    image_size: ImageSize
    microbatch_size: int
    device: torch.device | str
    seed: int = 0

    def __post_init__(self) -> None:
        self._images_by_size: dict[int, Tensor] = {}
        self._is_open = True

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request until the loader is closed; the label is index modulo num_classes.

        Raises: ValueError if a request has not microbatch_size samples.
        """
        for request in requests:
            if not self._is_open:
                return
            if len(request.indices_B) != self.microbatch_size:
                raise ValueError(f"got {len(request.indices_B)} samples, microbatch_size is {self.microbatch_size}")
            yield Batch(
                images_BCHW=self._images(self.image_size(request.epoch)),
                labels_B=torch.from_numpy(request.indices_B % self.num_classes),
                valid_B=torch.from_numpy(request.valid_B),
                request=request,
            )

    def close(self) -> None:
        self._is_open = False

    def _images(self, size: int) -> Tensor:
        if size not in self._images_by_size:
            generator = torch.Generator(self.device).manual_seed(self.seed)
            shape = (self.microbatch_size, size, size, 3)
            images_BHWC = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=generator)
            # made as BHWC, so that memory is channels-last as from the other loaders
            self._images_by_size[size] = images_BHWC.permute(0, 3, 1, 2)
        return self._images_by_size[size]
