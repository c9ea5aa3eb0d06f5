"""Read images in advance, and draw the crop box and flip of each."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from threading import Lock
from typing import TypeVar

import numpy as np

from bigbatch.errors import DataError, StorageError
from bigbatch.parts import load
from bigbatch.trainer.input.base import BadImage, LoaderSetup, Request, too_many_bad_images
from bigbatch.trainer.input.formats import encoded_size, require_pixels
from bigbatch.trainer.input.retry import BatchWait, PatientReads, PendingBatch

UPRIGHT_CROP = "bigbatch.trainer.input.shown.upright_crop"
T = TypeVar("T")


def prefetch(
    items: Iterable[T], *, depth: int, on_close: Callable[[], None] = lambda: None
) -> Generator[T, None, None]:
    """Yield items in order while one thread draws up to depth of them in advance.

    Starts at the first draw. An exception of items is raised at its place in the order. Closing calls on_close, waits
    for the item in progress, drops the rest, ends the thread and closes items if it is a generator.
    """
    source, end = iter(items), object()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bigbatch-prefetch")
    # one worker runs these calls one after the other, so the order is kept without a queue or a lock
    pending = deque(thread.submit(next, source, end) for _ in range(depth))
    try:
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, source, end))
            yield item  # type: ignore[misc]
    finally:
        on_close()
        thread.shutdown(wait=True, cancel_futures=True)
        if isinstance(source, Generator):
            # after the thread has ended: a generator that runs cannot be closed
            source.close()


class UndecodableError(DataError):
    """Only decoding showed that the image at position is bad."""

    def __init__(self, message: str, *, position: int) -> None:
        super().__init__(message)
        self.position = position


class BadImages:
    """Lists the bad images of one split that this process has read. In training the next usable image replaces each.

    Only its bytes and the decoder decide whether an image is bad, so all ranks skip the same ones in every epoch.
    """

    def __init__(self, *, max_skipped: int | None, num_images: int) -> None:
        """Set how many of num_images may be bad; max_skipped is None to end at the first one."""
        self._max_skipped = max_skipped
        self._num_images = num_images
        self._lock = Lock()
        self.reasons: dict[int, str] = {}
        """Position in the split -> bad image."""

    def add(self, position: int, error: DataError) -> None:
        """Skip the image from now on; from any thread. Raises: DataError if no more may be skipped."""
        if self._max_skipped is None or isinstance(error, StorageError):  # the storage is at fault, not the image
            raise error
        with self._lock:
            number = len(self.reasons.keys() | {position})
            # the image that is one too many is not recorded, so that it ends the next load, too
            if number > self._max_skipped:
                raise too_many_bad_images(number, max_skipped=self._max_skipped, last=str(error)) from error
            if number == self._num_images:
                raise DataError(f"all {number} images of the split are bad; the last is {error}") from error
            self.reasons[position] = str(error)


@dataclass(frozen=True)
class EncodedBatch:
    """Holds one request with its files in memory, ready to decode, resize and flip each box."""

    request: Request
    positions: list[int]
    """Positions of the images in the split: those of the request, or of replacements for bad images."""
    images: list[bytes]
    names: list[str]
    """Path of each image, for messages."""
    boxes_B4: np.ndarray
    """(top, left, height, width) in the stored image, int32."""
    turns_B: np.ndarray
    """What remains to do after resizing, as an EXIF orientation: 1 for nothing, 2 to mirror; others by turned()."""
    labels_B: np.ndarray
    valid_B: np.ndarray
    image_size: int
    """Height and width after decoding, in pixels."""
    replaced: tuple[BadImage, ...] = ()


UsableImage = tuple[int, bytes, Sequence[int]]
"""Position, content, (height, width)."""

IMAGES_PER_SECOND = 12_000
"""Target rate of reads: more than any GPU needs, because a batch also waits for its slowest read."""
MAX_THREADS = 64


class ReadingThreads:
    """Chooses the number of threads that read a batch, from the latency of reads."""

    def __init__(self, least: int) -> None:
        self.number = self._least = least
        self._before: tuple[int, float] | None = None
        """Number and latency before the last increase."""
        self._pause_batches = 0

    def adapt(self, latency_seconds: float) -> None:
        """Set the number of threads for the next batch from the mean time of this batch's reads.

        A rate needs rate * latency reads in progress at once (Little 1961). The number doubles up to that, until reads
        become slower: then they wait for cores, the interpreter lock or a busy server. The next attempt comes after as
        many batches as there are threads, because one batch may be slow by chance.
        """
        needed = max(self._least, min(MAX_THREADS, math.ceil(IMAGES_PER_SECOND * latency_seconds)))
        before, self._before = self._before, None
        if before is not None and latency_seconds > 1.5 * before[1]:
            self.number = self._pause_batches = before[0]
        elif needed <= self.number:
            self.number = needed
        elif self._pause_batches:
            self._pause_batches -= 1
        else:
            self._before = self.number, latency_seconds
            self.number = min(2 * self.number, needed)


class EncodedReader:
    """Turns requests into encoded batches in its own threads, ahead of the decoder."""

    def __init__(self, setup: LoaderSetup) -> None:
        self.setup, self._source, self._max_pixels, data = setup, setup.source, setup.max_pixels, setup.data
        self.bad = BadImages(max_skipped=data.max_skipped, num_images=len(setup.source))
        self.awaited: BatchWait | None = None
        """Wait of the consumer, which sets it; None without one."""
        self._upright_crop = load(UPRIGHT_CROP) if data.exif_orientation else None
        self._reads: PatientReads | None = None
        # two reading threads can feed many decoders, and leave them the cores; slow storage makes the reader start more
        self._threads = ReadingThreads(min(2, data.num_threads))

    def read(self, requests: Iterable[Request]) -> Generator[EncodedBatch, None, None]:
        """Yield one batch per request, in order. Raises: DataError naming the image; errors of requests, in order."""
        data = self.setup.data
        reads = PatientReads(self._source, patience_seconds=data.patience_seconds, awaited=lambda: self.awaited)
        self._reads = reads

        def batches() -> Iterator[EncodedBatch]:
            begun = ((request, self._begin(request, reads)) for request in requests)
            with reads.threads(), closing(prefetch(begun, depth=1)) as pending_batches:
                reads.use_threads(self._threads.number)
                for request, pending in pending_batches:
                    yield self._finish(request, pending, reads)

        # closing stops the reads before it waits for the batch in progress
        return prefetch(batches(), depth=data.prefetch_batches, on_close=reads.stop)

    def interrupt(self) -> None:
        """Stop the last call of read and drop its batches: closing it then does not wait for the storage."""
        self.awaited = None
        if self._reads is not None:
            self._reads.stop()

    def close(self) -> None:
        """Release the source's open files; reading again is possible."""
        if self._reads is not None:
            self._reads.join()
        self._source.close()

    def _begin(self, request: Request, reads: PatientReads) -> PendingBatch[UsableImage]:
        """Start to read one batch. Raises: ValueError if the request has not microbatch_size samples."""
        if len(request.indices_B) != self.setup.microbatch_size:
            raise ValueError(f"got {len(request.indices_B)} samples, microbatch_size is {self.setup.microbatch_size}")
        positions_B = request.indices_B % len(self._source.labels_N)
        asked, known_B2 = positions_B.tolist(), self._source.sizes(positions_B)
        sizes = [None] * len(asked) if known_B2 is None else known_B2.tolist()
        return reads.begin(asked, lambda row: self._read_usable(asked[row], sizes[row], reads))

    def _finish(self, request: Request, pending: PendingBatch[UsableImage], reads: PatientReads) -> EncodedBatch:
        """Return a batch that was begun. Raises: what _read_usable raises; StuckError."""
        found = reads.finish(pending)
        if latencies := tuple(reads.latencies):
            reads.latencies.clear()  # before the number changes: later ones are with the new number
            self._threads.adapt(fmean(latencies))
            if self._threads.number != reads.num_threads:
                reads.use_threads(self._threads.number)
        return self._encoded(request, list(pending.asked), found)

    def _encoded(self, request: Request, asked: list[int], found: list[UsableImage]) -> EncodedBatch:
        positions = [position for position, _, _ in found]
        crop = self.setup.crop
        crop = self._upright_crop(crop, [data for _, data, _ in found]) if self._upright_crop else crop
        boxes_B4, flips_B = crop(request.epoch, request.indices_B, np.array([size for _, _, size in found]))
        encoded = EncodedBatch(
            request=request,
            positions=positions,
            images=[data for _, data, _ in found],
            names=[self._source.name(position) for position in positions],
            boxes_B4=boxes_B4,
            turns_B=flips_B + np.uint8(1),
            labels_B=self._source.labels_N[positions],
            valid_B=request.valid_B,
            image_size=self.setup.image_size(request.epoch),
        )
        return encoded if positions == asked else self._with_replaced(encoded, asked)

    def _with_replaced(self, encoded: EncodedBatch, asked: list[int]) -> EncodedBatch:
        """Return the batch with the bad images of those asked for, whose replacements are not valid."""
        replaced = tuple(
            BadImage(position, self.bad.reasons[position])
            for position, used in zip(asked, encoded.positions, strict=True)
            if position != used
        )
        # the replacement is also read at its own position, so an evaluation must not count it here
        valid_B = encoded.valid_B & (np.array(encoded.positions) == asked)
        return replace(encoded, valid_B=valid_B, replaced=replaced)

    def _read_usable(self, position: int, size: Sequence[int] | None, reads: PatientReads) -> UsableImage:
        """Read the image at position, or the next one after it that is not bad.

        size: (height, width) from the source; None: take it from the image's header.
        """
        while True:
            if position not in self.bad.reasons:
                try:
                    if size is not None and size[0] * size[1] > self._max_pixels:
                        require_pixels(size, path=self._source.name(position), max_pixels=self._max_pixels)
                    data = reads.read(position)
                    if size is None:
                        size = encoded_size(data, path=self._source.name(position), max_pixels=self._max_pixels)
                    return position, data, size
                except DataError as error:
                    self.bad.add(position, error)
            # the loop ends, because BadImages raises if all images are bad
            position = (position + 1) % len(self._source)
            known_12 = self._source.sizes(np.array([position]))
            size = None if known_12 is None else known_12[0].tolist()
