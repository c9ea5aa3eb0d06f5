"""Pillow in threads: needs nothing but Pillow, and is the peer that the DALI loader is compared with."""

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import torch
from PIL import Image

from bigbatch.trainer.data.encoded import EncodedBatch, EncodedReader, ahead, open_picture
from bigbatch.trainer.data.loader import Batch, Crop, PictureSource, Request


class FolderLoader:
    """Decodes in threads (Pillow lets go of the interpreter lock), working prefetch_batches ahead.

    No worker processes: to fork is unsafe once MPI, gloo or CUDA have started threads.
    """

    def __init__(
        self,
        *,
        index: PictureSource,
        crop: Crop,
        image_size: int,
        microbatch_size: int,
        num_threads: int,
        prefetch_batches: int,
        pin_memory: bool = False,
    ) -> None:
        """pin_memory: decode into page-locked memory, from which a copy to a GPU does not wait for the device."""
        self._reader = EncodedReader(
            index,
            crop,
            microbatch_size=microbatch_size,
            num_threads=min(2, num_threads),
            prefetch_batches=prefetch_batches,
        )
        self._image_size = image_size
        self._num_threads = num_threads
        self._prefetch_batches = prefetch_batches
        self._pin_memory = pin_memory
        self._stream: Generator[Batch, None, None] | None = None

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request, in order; ends the iterator of an earlier load.

        Raises: DataError naming a picture that cannot be read or decoded.
        """
        self._end_stream()
        self._stream = ahead(self._batches(requests), depth=self._prefetch_batches)
        return self._stream

    def close(self) -> None:
        self._end_stream()
        self._reader.close()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        with (
            closing(self._reader.read(requests)) as encoded,
            ThreadPoolExecutor(self._num_threads, thread_name_prefix="bigbatch-decode") as threads,
        ):
            for batch in encoded:
                yield self._decode(batch, threads)

    def _decode(self, batch: EncodedBatch, threads: ThreadPoolExecutor) -> Batch:
        size = self._image_size
        shape = (len(batch.names), size, size, 3)
        images_BHWC = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pin_memory)
        pixels_BHWC = images_BHWC.numpy()

        def fill(row: int) -> None:
            picture = open_picture(batch.jpegs[row], path=batch.names[row])
            box, flip = batch.boxes_B4[row], batch.flips_B[row]
            pixels_BHWC[row] = np.asarray(resized_box(picture, box=box, flip=flip, image_size=size))

        for _ in threads.map(fill, range(len(batch.names))):
            pass  # raises what fill raised
        return Batch(
            images_BCHW=images_BHWC.permute(0, 3, 1, 2),
            labels_B=torch.from_numpy(batch.labels_B),
            valid_B=torch.from_numpy(batch.valid_B),
        )


def resized_box(picture: Image.Image, *, box: np.ndarray, flip: bool, image_size: int) -> Image.Image:
    """Cut box (top, left, height, width) out, resize it to a square (antialiased bilinear) and flip it.

    The pixels of torchvision's resized_crop. Pillow's resize(box=...) would be one pass less, but lets the
    filter reach over the edge of the box.
    """
    top, left, height, width = map(int, box)
    picture = picture.crop((left, top, left + width, top + height)).convert("RGB")
    picture = picture.resize((image_size, image_size), Image.Resampling.BILINEAR)
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else picture
