"""Decoder with Pillow in threads: needs only Pillow, and is the reference for the DALI decoder."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from bigbatch.errors import DataError
from bigbatch.trainer.input.base import Batch, LoaderSetup
from bigbatch.trainer.input.formats import open_image
from bigbatch.trainer.input.loaders.encoded import as_batch, resize_all
from bigbatch.trainer.input.reading import EncodedBatch, UndecodableError, prefetch


@dataclass(frozen=True)
class PillowDecoder:
    """Decodes in threads (Pillow releases the GIL), prefetch_batches ahead.

    No worker processes: a fork is unsafe once MPI, gloo or CUDA have started threads.
    """

    setup: LoaderSetup

    def decode(self, encoded: Generator[EncodedBatch, None, None]) -> Generator[Batch, None, None]:
        """Yield one batch per encoded batch, in order. Raises: UndecodableError naming the image."""
        return prefetch(self._batches(encoded), depth=self.setup.data.prefetch_batches)

    def close(self) -> None:
        """Do nothing: nothing is kept between calls."""

    def _batches(self, encoded: Generator[EncodedBatch, None, None]) -> Iterator[Batch]:
        num_threads, max_pixels = self.setup.data.num_threads, self.setup.max_pixels
        with closing(encoded), ThreadPoolExecutor(num_threads, thread_name_prefix="bigbatch-decode") as threads:
            for batch in encoded:
                images_BHWC = resize_all(
                    partial(decoded_box, batch, max_pixels), batch, threads=threads, setup=self.setup
                )
                yield as_batch(batch, images_BHWC)


def decoded_box(batch: EncodedBatch, max_pixels: int, row: int) -> np.ndarray:
    """Decode the box of one image, uint8 (height, width, 3). Raises: UndecodableError naming the image."""
    try:
        image = open_image(batch.images[row], path=batch.names[row], max_pixels=max_pixels)
    except DataError as error:
        raise UndecodableError(str(error), position=batch.positions[row]) from error
    top, left, height, width = batch.boxes_B4[row].tolist()
    # cropped first, so that only the box is converted
    return np.array(image.crop((left, top, left + width, top + height)).convert("RGB"))
