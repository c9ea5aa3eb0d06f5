"""Loader of encoded images: a reader and a decoder, which a table names; also for scripts that use it alone."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbatch.errors import ConfigError
from bigbatch.parts import load
from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.input.base import Batch, Crop, ImageSize, ImageSource, LoaderSetup, Request
from bigbatch.trainer.input.formats import MAX_PIXELS
from bigbatch.trainer.input.reading import EncodedBatch, EncodedReader, UndecodableError
from bigbatch.trainer.input.retry import BatchWait

DECODERS = {
    "dali": "bigbatch.trainer.input.loaders.dali.DaliDecoder",
    "torchvision": "bigbatch.trainer.input.loaders.pillow.PillowDecoder",
}
"""Loader of encoded images -> import path of its decoder, made from a LoaderSetup."""
TURNED = "bigbatch.trainer.input.shown.turned"


def as_batch(encoded: EncodedBatch, images_BHWC: Tensor) -> Batch:
    """Return the batch of an encoded batch's request, with its decoded images."""
    return Batch(
        images_BCHW=images_BHWC.permute(0, 3, 1, 2),
        labels_B=torch.from_numpy(encoded.labels_B),
        valid_B=torch.from_numpy(encoded.valid_B),
        request=encoded.request,
        replaced=encoded.replaced,
        positions=encoded.positions,
    )


class Decoder(Protocol):
    """Turns encoded batches into batches, in order, ahead of the consumer."""

    def decode(self, encoded: Generator[EncodedBatch, None, None]) -> Generator[Batch, None, None]:
        """Yield one batch per encoded batch; closing it closes encoded. May end the generator of an earlier call.

        Raises: UndecodableError naming the image, and what encoded raises.
        """

    def close(self) -> None:
        """Free memory and threads; safe to call twice."""


class ImageLoader:
    """Loader that reads and decodes ahead; if bad images may be skipped, other images replace them."""

    def __init__(self, reader: EncodedReader, decoder: Decoder) -> None:
        self.reader = reader
        self.decoder = decoder
        self._stream: Generator[Batch, None, None] | None = None

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request, in order; ends the iterator of an earlier load.

        Raises: DataError naming an image that cannot be read or decoded.
        """
        self.end()
        self._stream = self._batches(iter(requests))
        return self._stream

    def close(self) -> None:
        """Stop background work; a closed loader may be used again."""
        self.end()
        self.decoder.close()
        self.reader.close()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Context for a trial load: forget the bad images that it meets."""
        known = dict(self.reader.bad.reasons)
        try:
            yield
        finally:
            self.end()
            self.reader.bad.reasons = known

    def end(self) -> None:
        """End the iterator of the last load, and its background work."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _batches(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Yield batches; after an image that fails in decoding, read all batches in flight again."""
        under_way: deque[Request] = deque()
        again: deque[Request] = deque()

        def drawn() -> Iterator[Request]:
            while (request := again.popleft() if again else next(requests, None)) is not None:
                under_way.append(request)
                yield request

        awaited = BatchWait()
        while True:
            self.reader.awaited = awaited
            try:
                with closing(self.decoder.decode(self.reader.read(drawn()))) as batches:
                    try:
                        for batch in batches:
                            under_way.popleft()
                            self.reader.awaited = None
                            yield batch
                            self.reader.awaited = awaited = BatchWait()
                    finally:
                        self.reader.interrupt()
                return
            except UndecodableError as error:
                self.reader.bad.add(error.position, error)
                # requests left over from an earlier failure come after those under way now
                again.extendleft(reversed(under_way))
                under_way.clear()


def make_loader(setup: LoaderSetup) -> ImageLoader:
    """Make the loader that data.loader names, one of DECODERS. Raises: ConfigError, as the decoder does."""
    return ImageLoader(EncodedReader(setup), load(DECODERS[setup.data.loader])(setup))


def make_image_loader(
    name: str,
    source: ImageSource,
    *,
    crop: Crop,
    image_size: int | ImageSize,
    microbatch_size: int,
    device_id: int | None = None,
    pin_memory: bool = False,
    max_pixels: int = MAX_PIXELS,
    **data: Any,
) -> ImageLoader:
    """Make a loader without a config.

    name: dali (on GPU device_id, or on the CPU if that is None), or torchvision (Pillow and torch; pin_memory for
    copies to a GPU). data: other keys of a config's section data, such as num_threads, prefetch_batches,
    patience_seconds, max_skipped and exif_orientation; their defaults are the config's.
    Raises: ConfigError for another name, or for dali if it is not installed.
    """
    if name not in DECODERS:
        raise ConfigError(f"{name!r} is not a loader of images: name one of {', '.join(DECODERS)}")
    device = torch.device("cuda" if pin_memory else "cpu") if device_id is None else torch.device("cuda", device_id)
    return make_loader(
        LoaderSetup(
            source=source,
            crop=crop,
            image_size=image_size if callable(image_size) else lambda epoch: image_size,
            microbatch_size=microbatch_size,
            device=device,
            data=DataConfig(loader=name, max_megapixels=max_pixels / 1e6, **data),
        )
    )


PARTS_PER_THREAD = 4


def resize_all(
    box: Callable[[int], np.ndarray], batch: EncodedBatch, *, threads: ThreadPoolExecutor, setup: LoaderSetup
) -> Tensor:
    """Resize the images of a batch, uint8 (B, size, size, 3), turned where asked; page-locked if they go to a GPU.

    box: row -> its cropped image, uint8 (height, width, 3); called in the threads. Raises: what box raised.
    Starts a few tasks per thread: one per row would cost more than a resize does, and one per thread balances badly.
    """
    shape_BHWC, must_pin = (len(batch.names), batch.image_size, batch.image_size, 3), setup.device.type == "cuda"
    stride = min(len(batch.names), PARTS_PER_THREAD * setup.data.num_threads)
    images_BHWC = torch.empty(shape_BHWC, dtype=torch.uint8, pin_memory=must_pin)
    pixels_BHWC = images_BHWC.numpy()

    def fill_part(first: int) -> None:
        for row in range(first, len(batch.names), stride):
            resize_into(pixels_BHWC[row], box(row), turn=int(batch.turns_B[row]))

    # iterates only for the exceptions, which map raises when its results are drawn
    for _ in threads.map(fill_part, range(stride)):
        pass
    return images_BHWC


# half of Pillow's time (215 us against 442, a box of ImageNet to 224 x 224, one core with AVX-512), a third of DALI's
def resize_into(pixels_HWC: np.ndarray, box_HWC: np.ndarray, *, turn: int) -> None:
    """Resize a box into pixels_HWC (antialiased bilinear), and turn it as in EncodedBatch; all uint8.

    Uses torch's integer kernel, as torchvision's transforms of tensors do: within 2 grey levels of Pillow's.
    """
    box_1CHW = torch.from_numpy(box_HWC).permute(2, 0, 1)[None]
    resized_1CHW = F.interpolate(box_1CHW, size=pixels_HWC.shape[:2], mode="bilinear", antialias=True)
    resized_HWC = resized_1CHW[0].permute(1, 2, 0).numpy()
    resized_HWC = resized_HWC if turn == 1 else resized_HWC[:, ::-1] if turn == 2 else load(TURNED)(resized_HWC, turn)
    pixels_HWC[:] = resized_HWC  # numpy copies in this thread, torch would start others
