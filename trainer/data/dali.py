"""NVIDIA DALI decodes just the box of each picture, on CPU or GPU. The only file that imports it."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bigbatch.trainer.data.encoded import EncodedBatch, EncodedReader, open_picture
from bigbatch.trainer.data.loader import Batch, Crop, PictureSource, Request
from bigbatch.trainer.errors import ConfigError, DataError


class DaliLoader:
    """Decodes in DALI's threads, working prefetch_batches ahead; one pipeline lives across all loads.

    device_id None decodes on the CPU; else the JPEGs are decoded by that GPU and the pictures stay there.
    A picture that is cut off is always an error; a JPEG damaged inside may pass with wrong pixels, as libjpeg
    only warns of that.
    """

    def __init__(
        self,
        *,
        index: PictureSource,
        crop: Crop,
        image_size: int,
        microbatch_size: int,
        device_id: int | None,
        num_threads: int,
        prefetch_batches: int,
    ) -> None:
        """Raises: ConfigError if DALI is not installed."""
        _import_dali()
        self._reader = EncodedReader(
            index,
            crop,
            microbatch_size=microbatch_size,
            # reading waits more than it computes; two threads feed many decoders and leave them the cores
            num_threads=min(2, num_threads),
            prefetch_batches=prefetch_batches,
        )
        self._build = partial(
            _build_pipeline,
            self._feed,
            image_size=image_size,
            microbatch_size=microbatch_size,
            device_id=device_id,
            num_threads=num_threads,
            prefetch_batches=prefetch_batches,
        )
        self._device_id = device_id
        self._pipeline: Any = None
        self._encoded: Iterator[EncodedBatch] = iter(())
        self._in_flight: deque[EncodedBatch] = deque()
        self._stream: Generator[Batch, None, None] | None = None

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request, in order; ends the iterator of an earlier load.

        Raises: DataError naming a picture that cannot be read or decoded.
        """
        self._end_stream()
        self._stream = self._batches(requests)
        return self._stream

    def close(self) -> None:
        self._end_stream()
        self._pipeline = None
        self._reader.close()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _batches(self, requests: Iterable[Request]) -> Generator[Batch, None, None]:
        if self._pipeline is None:
            self._pipeline = self._build()
        with closing(self._reader.read(requests)) as self._encoded:
            try:
                while (pictures := self._run()) is not None:
                    encoded = self._in_flight.popleft()
                    yield Batch(
                        images_BCHW=_as_torch(pictures).permute(0, 3, 1, 2),
                        labels_B=torch.from_numpy(encoded.labels_B),
                        valid_B=torch.from_numpy(encoded.valid_B),
                    )
            finally:
                self._drain()

    def _feed(self) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        """What DALI asks for once per batch; it takes StopIteration for the end of the stream."""
        encoded = next(self._encoded)
        self._in_flight.append(encoded)
        jpegs = [np.frombuffer(jpeg, np.uint8) for jpeg in encoded.jpegs]
        starts_B2, shapes_B2 = np.split(encoded.boxes_B4, 2, axis=1)
        flips_B = encoded.flips_B.astype(np.int32)
        return jpegs, np.ascontiguousarray(starts_B2), np.ascontiguousarray(shapes_B2), flips_B

    def _run(self) -> Any:
        """The next pictures as a DALI tensor list, or None at the end of the stream."""
        try:
            return self._pipeline.run(_current_stream(self._device_id))[0]
        except StopIteration:
            return None
        except DataError:  # from the reader, by way of _feed
            raise
        except RuntimeError:
            self._pipeline = None  # an executor that failed stays failed
            _raise_if_undecodable(self._in_flight)
            raise

    def _drain(self) -> None:
        """Throw away what is in flight, so that the next load starts with an empty queue."""
        self._encoded = iter(())
        try:
            while self._pipeline is not None and self._run() is not None:
                pass
        except RuntimeError:
            # nobody will see these pictures, so nobody needs to hear of a bad one; _run dropped the pipeline
            assert self._pipeline is None
        self._in_flight.clear()
        if self._pipeline is not None:
            self._pipeline.reset()


def _import_dali() -> tuple[Any, Any, Any]:
    try:
        from nvidia.dali import Pipeline, fn, types
    except ImportError as error:
        raise ConfigError(
            f"data.loader=dali needs NVIDIA DALI ({error}): pip install 'bigbatch[dali]', or set data.loader to "
            "torchvision"
        ) from error
    return Pipeline, fn, types


def _build_pipeline(
    feed: Callable[[], Any],
    *,
    image_size: int,
    microbatch_size: int,
    device_id: int | None,
    num_threads: int,
    prefetch_batches: int,
) -> Any:
    """(JPEG, top-left, height-width, flip) -> box decoded, resized to image_size, flipped; uint8 HWC."""
    Pipeline, fn, types = _import_dali()
    pipeline = Pipeline(
        batch_size=microbatch_size,
        num_threads=num_threads,
        device_id=device_id,
        prefetch_queue_depth=prefetch_batches,
        # outputs then own their memory; bound to torch's stream they are freed in that stream's order
        exec_dynamic=True,
    )
    with pipeline:
        jpegs, starts, shapes, flips = fn.external_source(source=feed, num_outputs=4, batch=True)
        pictures = fn.decoders.image_slice(
            jpegs,
            start=starts,
            shape=shapes,
            axes=[0, 1],
            device="cpu" if device_id is None else "mixed",
            output_type=types.RGB,
            # boxes are those of the stored picture; an EXIF rotation would come between
            adjust_orientation=False,
        )
        pictures = fn.resize(pictures, size=[image_size, image_size], interp_type=types.INTERP_TRIANGULAR)
        pipeline.set_outputs(fn.flip(pictures, horizontal=flips))
    return pipeline


def _current_stream(device_id: int | None) -> Any:
    return None if device_id is None else torch.cuda.current_stream(device_id)


def _as_torch(pictures: Any) -> Tensor:
    """A DALI tensor list (B, H, W, C) as a tensor that shares its memory and keeps it from reuse."""
    return from_dlpack(pictures.as_tensor())


def _raise_if_undecodable(batches: Iterable[EncodedBatch]) -> None:
    """Raise the DataError of the first picture that cannot be decoded; DALI's own message names none."""
    for batch in batches:
        for data, name in zip(batch.jpegs, batch.names, strict=True):
            open_picture(data, path=name)
