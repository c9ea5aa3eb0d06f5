"""Pictures as they lie on disk, read ahead of use, with the box and the flip that each is to get."""

import io
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from bigbatch.trainer.data.imagenet import PictureIndex
from bigbatch.trainer.data.loader import Crop, Request
from bigbatch.trainer.errors import DataError

T = TypeVar("T")

# start-of-frame markers: 0xC0..0xCF without DHT (C4), JPG (C8) and DAC (CC)
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ADVICE = "replace or remove it"


def ahead(items: Iterable[T], *, depth: int) -> Generator[T, None, None]:
    """Yield items in order while one thread draws up to depth of them in advance.

    Starts at the first draw. An exception of items is raised at its place in the order. Closing waits for
    the item in progress, drops the rest, ends the thread and closes items if it is a generator.
    """
    source, end = iter(items), object()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bigbatch-ahead")
    # one worker runs these calls one after the other, so the order is kept without a queue or a lock
    pending = deque(thread.submit(next, source, end) for _ in range(depth))
    try:
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, source, end))
            yield item  # type: ignore[misc]
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
        if isinstance(source, Generator):
            source.close()


@dataclass(frozen=True)
class EncodedBatch:
    """One request with its files in memory: what is left is to decode each box, resize and flip it."""

    jpegs: list[bytes]
    paths: list[str]
    boxes_B4: np.ndarray
    """(top, left, height, width) in the stored picture, int32."""
    flips_B: np.ndarray
    labels_B: np.ndarray
    valid_B: np.ndarray


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) from a JPEG's frame header in a few microseconds; None if it is no complete JPEG."""
    if data[:2] != b"\xff\xd8":
        return None
    at, length = 2, len(data)
    while at + 9 <= length and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in _START_OF_FRAME:
            # coded data never holds an end marker, so a file without one behind this header is cut off
            complete = data.rfind(b"\xff\xd9", at) >= 0
            size = int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
            return size if complete and min(size) > 0 else None
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def picture_size(data: bytes, *, path: str) -> tuple[int, int]:
    """(height, width) of a JPEG or an 8-bit PNG, whatever its name says (ImageNet has a PNG named .JPEG).

    Raises: DataError if it is neither, or cut off.
    """
    size = jpeg_size(data)
    if size is None:
        picture = open_picture(data, path=path)
        size = picture.height, picture.width
    return size


def open_picture(data: bytes, *, path: str) -> Image.Image:
    """Decode a picture completely, in its own mode and without applying its EXIF orientation.

    Raises: DataError naming path if it is not an 8-bit JPEG or PNG, is cut off, or is corrupt.
    """
    try:
        picture = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: is not a picture; {_ADVICE}") from error
    except OSError as error:  # cut off within the header
        raise DataError(f"{path}: cannot be read as a picture ({error}); {_ADVICE}") from error
    if picture.format not in ("JPEG", "MPO", "PNG") or picture.mode.startswith("I"):
        raise DataError(f"{path}: is {picture.format} in mode {picture.mode}; save it as 8-bit JPEG or PNG")
    try:
        picture.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: cannot be decoded ({error}); {_ADVICE}") from error
    return picture


def _read_picture(path: str) -> tuple[bytes, tuple[int, int]]:
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); was it moved since the start?") from error
    return data, picture_size(data, path=path)


class EncodedReader:
    """Turns requests into encoded batches with its own threads, ahead of whoever decodes them."""

    def __init__(
        self,
        index: PictureIndex,
        crop: Crop,
        *,
        microbatch_size: int,
        num_threads: int,
        prefetch_batches: int,
    ) -> None:
        self._index = index
        self._crop = crop
        self._microbatch_size = microbatch_size
        self._num_threads = num_threads
        self._prefetch_batches = prefetch_batches

    def read(self, requests: Iterable[Request]) -> Generator[EncodedBatch, None, None]:
        """Yield one batch per request, in order. Raises: DataError naming the path."""
        return ahead(self._read_all(requests), depth=self._prefetch_batches)

    def _read_all(self, requests: Iterable[Request]) -> Iterator[EncodedBatch]:
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="bigbatch-read") as threads:
            for request in requests:
                yield self._read_one(request, threads)

    def _read_one(self, request: Request, threads: ThreadPoolExecutor) -> EncodedBatch:
        """Raises: ValueError if the request has not microbatch_size samples."""
        if len(request.indices_B) != self._microbatch_size:
            raise ValueError(f"got {len(request.indices_B)} samples, microbatch_size is {self._microbatch_size}")
        paths = [self._index.full_path(position) for position in request.indices_B]
        # one task per thread, not per file: a task costs as much as reading a cached file
        parts = [paths[part :: self._num_threads] for part in range(self._num_threads)]
        pictures: list = [None] * len(paths)
        for part, read in enumerate(threads.map(lambda part: [_read_picture(path) for path in part], parts)):
            pictures[part :: self._num_threads] = read
        sizes_B2 = np.array([size for _, size in pictures], np.int64)
        boxes_B4, flips_B = self._crop(request.epoch, request.indices_B, sizes_B2)
        return EncodedBatch(
            jpegs=[data for data, _ in pictures],
            paths=paths,
            boxes_B4=boxes_B4,
            flips_B=flips_B,
            labels_B=self._index.labels_N[request.indices_B],
            valid_B=request.valid_B,
        )
