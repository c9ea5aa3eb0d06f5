"""Decoder with NVIDIA DALI, on CPU or GPU: decodes only the box of each image. The only file that imports DALI."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bigbatch.errors import ConfigError, DataError, StorageError, pip_install
from bigbatch.parts import load
from bigbatch.trainer.input.base import Batch, LoaderSetup
from bigbatch.trainer.input.formats import encoded_size, open_image
from bigbatch.trainer.input.loaders.encoded import as_batch, resize_all
from bigbatch.trainer.input.reading import EncodedBatch, UndecodableError, prefetch

TURN_ = "bigbatch.trainer.input.shown.turn_"
HARDWARE_SHARE = 0.65
"""Share of the JPEGs that a GPU's decoding engine takes, if it has one."""


class DaliDecoder:
    """Decodes in DALI's threads, prefetch_batches ahead; one pipeline serves all calls.

    A thread feeds DALI and takes its images. With device_id None DALI decodes on the CPU, and torch resizes in a third
    of the time of DALI's resize; else that GPU decodes and resizes, and the images stay there. A cut image is always
    an error; a JPEG damaged inside may pass with wrong pixels, because libjpeg only warns of it.
    """

    def __init__(self, setup: LoaderSetup) -> None:
        """Set up DALI. Raises: ConfigError if it is not installed, or for a GPU of AMD."""
        _import_dali()
        self._setup, self._device_id = setup, setup.device.index
        if self._device_id is not None and torch.version.hip:
            raise ConfigError("data.loader=dali needs an NVIDIA GPU, and this torch is for ROCm: set torchvision there")
        self._pipeline: Any = None
        self._encoded: Iterator[EncodedBatch] = iter(())
        self._in_flight: deque[EncodedBatch] = deque()
        self._failure: Exception | None = None  # raised by the encoded batches
        self._stream: torch.cuda.Stream | None = None
        """GPU stream on which the thread copies images from DALI, independent of the consumer's stream."""

    def decode(self, encoded: Generator[EncodedBatch, None, None]) -> Generator[Batch, None, None]:
        """Yield one batch for each, in order. Raises: UndecodableError naming the image."""
        if self._device_id is None:
            return prefetch(self._resized(encoded), depth=1)
        self._stream = self._stream or torch.cuda.Stream(torch.device("cuda", self._device_id))
        return self._handed_over(encoded)

    def close(self) -> None:
        self._pipeline = None

    def _resized(self, encoded: Generator[EncodedBatch, None, None]) -> Generator[Batch, None, None]:
        with ThreadPoolExecutor(self._setup.data.num_threads, thread_name_prefix="bigbatch-resize") as threads:

            def resized(boxes: Any) -> Tensor:
                batch = self._in_flight[0]
                return resize_all(lambda row: np.asarray(boxes[row]), batch, threads=threads, setup=self._setup)

            yield from self._decoded(encoded, resized)

    def _handed_over(self, encoded: Generator[EncodedBatch, None, None]) -> Generator[Batch, None, None]:
        copied: deque[torch.cuda.Event] = deque()

        def copy(images: Any) -> Tensor:
            # DALI's memory (B, H, W, C) is bound to this stream; the copy returns it to DALI at once
            with torch.cuda.stream(self._stream):
                images_BHWC = from_dlpack(images.as_tensor()).clone()
                if (turns_B := self._in_flight[0].turns_B).max() > 2:  # DALI has mirrored the others
                    load(TURN_)(images_BHWC, turns_B)
                copied.append(torch.cuda.Event())
                copied[-1].record(self._stream)
            return images_BHWC

        with closing(prefetch(self._decoded(encoded, copy), depth=1)) as batches:
            for batch in batches:
                consumer = torch.cuda.current_stream(self._device_id)
                consumer.wait_event(copied.popleft())
                # without it, torch would give the memory to the next copy while the consumer's stream still reads it
                batch.images_BCHW.record_stream(consumer)
                yield batch

    def _decoded(
        self, encoded: Generator[EncodedBatch, None, None], finish: Callable[[Any], Tensor]
    ) -> Generator[Batch, None, None]:
        if self._pipeline is None:
            self._pipeline = _build_pipeline(self._feed, self._setup)
        with closing(encoded):
            self._encoded, self._failure = encoded, None
            try:
                while (images := self._next()) is not None:
                    images_BHWC = finish(images)
                    yield as_batch(self._in_flight.popleft(), images_BHWC)
            finally:
                # also if the consumer stops midway: the pipeline stays, and its queue must be empty
                self._drain()
            if self._failure is not None:
                raise self._failure

    def _feed(self) -> tuple[list[np.ndarray], ...]:
        """Return DALI's input for one batch; StopIteration ends the stream.

        A failure also ends the stream, and is raised after the batches in flight.
        """
        try:
            encoded = next(self._encoded)
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            raise StopIteration from error
        # DALI keeps the order, so its next run returns the oldest batch in flight
        self._in_flight.append(encoded)
        return _inputs(encoded, with_resize=self._device_id is not None)

    def _next(self) -> Any:
        """Return the next batch as DALI's tensor list, None at the end of the stream.

        Raises: UndecodableError if an image caused DALI's error; else its RuntimeError.
        """
        try:
            return self._pipeline.run(self._stream)[0]
        except StopIteration:
            return None
        except RuntimeError:
            self._pipeline = None  # DALI's executor does not recover from a failure
            self._raise_cause()
            raise

    def _raise_cause(self) -> None:
        # now, since skipping the image would read all batches in flight again
        if isinstance(self._failure, StorageError):
            raise self._failure from None
        _raise_if_undecodable(self._in_flight, self._setup)

    def _drain(self) -> None:
        """Discard batches in flight, so that the next call starts with an empty queue."""
        self._encoded = iter(())
        try:
            with suppress(StopIteration):
                while self._pipeline is not None:
                    self._pipeline.run(self._stream)
        except RuntimeError:  # these images are dropped, so a bad one is not reported
            self._pipeline = None
        self._in_flight.clear()
        if self._pipeline is not None:
            self._pipeline.reset()


def is_installed() -> bool:
    """Return whether DALI can be imported, without importing it."""
    # find_spec("nvidia.dali") imports nvidia, which may be missing
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def _import_dali() -> tuple[Any, Any, Any]:
    try:
        from nvidia.dali import Pipeline, fn, types
    except ImportError as error:
        extra = "dali-cuda12" if (torch.version.cuda or "").startswith("12") else "dali"
        raise ConfigError(
            f"data.loader=dali needs NVIDIA DALI ({error}): {pip_install(extra)}, or set data.loader to torchvision"
        ) from error
    return Pipeline, fn, types


def _inputs(encoded: EncodedBatch, *, with_resize: bool) -> tuple[Any, ...]:
    """Return DALI's inputs: images, (top, left), (height, width); with_resize also output sizes and flips."""
    images = [np.frombuffer(image, np.uint8) for image in encoded.images]
    starts_B2, shapes_B2 = (np.ascontiguousarray(half) for half in np.split(encoded.boxes_B4, 2, axis=1))
    if not with_resize:
        return images, starts_B2, shapes_B2
    sizes_B2 = np.full_like(starts_B2, encoded.image_size, np.float32)
    return images, starts_B2, shapes_B2, sizes_B2, (encoded.turns_B == 2).astype(np.int32)


def _build_pipeline(feed: Callable[[], Any], setup: LoaderSetup, *, hardware_share: float = HARDWARE_SHARE) -> Any:
    """Build the pipeline from _inputs to uint8 HWC boxes: decoded on CPU, or decoded, resized and flipped on a GPU."""
    Pipeline, fn, types = _import_dali()
    pipeline = Pipeline(
        batch_size=setup.microbatch_size,
        num_threads=setup.data.num_threads,
        device_id=setup.device.index,
        prefetch_queue_depth=setup.data.prefetch_batches,
        # outputs then own their memory; bound to a stream of torch's they are freed in that stream's order
        exec_dynamic=True,
    )
    is_gpu = setup.device.index is not None
    with pipeline:
        # the size to resize to is an input, so that it can change without another pipeline
        images, starts, shapes, *rest = fn.external_source(source=feed, num_outputs=5 if is_gpu else 3, batch=True)
        boxes = fn.decoders.image_slice(
            images,
            start=starts,
            shape=shapes,
            axes=[0, 1],
            device="mixed" if is_gpu else "cpu",
            output_type=types.RGB,
            # boxes refer to the stored image, also with data.exif_orientation
            adjust_orientation=False,
            **({"hw_decoder_load": hardware_share} if is_gpu else {}),
        )
        if is_gpu:
            sizes, flips = rest
            boxes = fn.resize(boxes, size=sizes, interp_type=types.INTERP_TRIANGULAR)
            boxes = fn.flip(boxes, horizontal=flips)
        pipeline.set_outputs(boxes)
    return pipeline


def _raise_if_undecodable(batches: Iterable[EncodedBatch], setup: LoaderSetup) -> None:
    """Raise UndecodableError naming the first image that DALI refuses to decode alone; DALI's error does not name it.

    DALI decides, not Pillow, which refuses more images: the result must not depend on the other images in flight.
    """
    alone = replace(setup, microbatch_size=1, data=replace(setup.data, num_threads=1, prefetch_batches=1))
    row = _first_refused([row for batch in batches for row in _rows(batch, setup.max_pixels)], alone)
    if row is None:
        return
    position, name = row.positions[0], row.names[0]
    try:
        open_image(row.images[0], path=name, max_pixels=setup.max_pixels)
    except DataError as error:
        raise UndecodableError(str(error), position=position) from error
    # an image that the CPU decodes is not at fault: the GPU has failed
    on_cpu = replace(alone, device=torch.device("cpu"))
    if setup.device.index is None or _first_refused([row], on_cpu) is not None:
        text = f"{name}: DALI cannot decode it, though Pillow can; save it again, or remove it"
        raise UndecodableError(text, position=position)


def _rows(batch: EncodedBatch, max_pixels: int) -> Iterator[EncodedBatch]:
    """Yield each image, uncropped, as a batch of one."""
    for data, name, position in zip(batch.images, batch.names, batch.positions, strict=True):
        box_14 = np.array([(0, 0, *encoded_size(data, path=name, max_pixels=max_pixels))], np.int32)
        no_turn_1 = np.ones(1, np.uint8)
        yield replace(batch, positions=[position], images=[data], names=[name], boxes_B4=box_14, turns_B=no_turn_1)


def _first_refused(rows: list[EncodedBatch], alone: LoaderSetup) -> EncodedBatch | None:
    """Return the first row that DALI cannot decode alone; None if it decodes all. alone: of batches of one image."""
    feed = (_inputs(row, with_resize=alone.device.index is not None) for row in rows)
    pipeline: Any = None
    for row in rows:
        try:
            pipeline = pipeline or _build_pipeline(lambda: next(feed), alone, hardware_share=0.0)
            pipeline.run()
        except RuntimeError:
            return row
    return None
