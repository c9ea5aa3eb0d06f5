"""No input at all: what a step costs when nothing is read, decoded or copied."""

from collections.abc import Iterable, Iterator

import torch

from bigbatch.trainer.data.loader import Batch, Request


class SyntheticLoader:
    """Yields the same random pictures, made once on the device, for every request; learns nothing."""

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: int,
        microbatch_size: int,
        device: torch.device | str,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (microbatch_size, image_size, image_size, 3)
        images_BHWC = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        self._images_BCHW = images_BHWC.permute(0, 3, 1, 2)
        self._num_classes = num_classes
        self._is_open = True

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request until the loader is closed; the label is index modulo num_classes.

        Raises: ValueError if a request has not microbatch_size samples.
        """
        for request in requests:
            if not self._is_open:
                return
            if len(request.indices_B) != len(self._images_BCHW):
                raise ValueError(f"got {len(request.indices_B)} samples, microbatch_size is {len(self._images_BCHW)}")
            labels_B = torch.from_numpy(request.indices_B % self._num_classes)
            yield Batch(images_BCHW=self._images_BCHW, labels_B=labels_B, valid_B=torch.from_numpy(request.valid_B))

    def close(self) -> None:
        self._is_open = False
