"""Loaders of other packages: data.loader names a class by its import path."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.dotted import make_own
from bigbatch.trainer.input.base import Batch, Loader, LoaderSetup, Request


class ImportedLoader:
    """Loader of another package; checks that each batch answers its request."""

    def __init__(self, loader: Loader, setup: LoaderSetup) -> None:
        self._loader, self._setup = loader, setup

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Do the same as Loader's method. Raises: ConfigError in one line for a batch of another kind."""
        positions = len(self._setup.source)  # a class of another package need not know of images that are drawn again
        asked = deque[Request]()

        def known(request: Request) -> Request:
            asked.append(request)
            return replace(request, indices_B=request.indices_B % positions)

        for batch in self._loader.load(map(known, requests)):
            if fault := self._fault(batch, asked):
                raise ConfigError(f"data.loader={self._setup.data.loader}: {fault}")
            # with the asked indices, from which the draws of mixup and other augmentations come
            read = batch.request.indices_B.tolist() if batch.positions is None else batch.positions
            yield replace(batch, request=asked.popleft(), positions=read)

    def close(self) -> None:
        self._loader.close()

    def _fault(self, batch: object, asked: Sequence[Request]) -> str | None:
        if not isinstance(batch, Batch):
            return f"yields a {type(batch).__name__}, not a bigbatch.trainer.input.base.Batch"
        if not asked or batch.request.indices_B.tolist() != (asked[0].indices_B % len(self._setup.source)).tolist():
            return "yields a batch of other images than the next request asks for"
        num, size = len(batch.request.indices_B), self._setup.image_size(batch.request.epoch)
        expected = {"images_BCHW": (num, 3, size, size), "labels_B": (num,), "valid_B": (num,)}
        dtypes = {"images_BCHW": torch.uint8, "labels_B": torch.int64, "valid_B": torch.bool}
        for name, shape in expected.items():
            tensor, dtype = getattr(batch, name), dtypes[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                return f"yields {name} of {tuple(tensor.shape)} {tensor.dtype}, not {shape} {dtype}"
        return None


def make_loader(setup: LoaderSetup) -> ImportedLoader:
    """Make the loader that data.loader names: its class is called with setup. Raises: ConfigError."""
    name = setup.data.loader
    return ImportedLoader(make_own(name, setup, key=f"data.loader={name}", methods=("load", "close")), setup)
