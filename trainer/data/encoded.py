"""Pictures as they lie on disk, read ahead of use, with the box and the flip that each is to get."""

import io
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from bigbatch.trainer.data.loader import Crop, PictureSource, Request
from bigbatch.trainer.errors import DataError

T = TypeVar("T")

# start-of-frame markers: 0xC0..0xCF without DHT (C4), JPG (C8) and DAC (CC)
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
_ADVICE = "replace or remove it"


class UnsupportedPictureError(DataError):
    """A picture that may be whole, but is of a kind that no loader takes."""


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
    names: list[str]
    """Where each lies, for messages."""
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


def png_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) from a PNG's header; None if it is no complete PNG, or one of 16-bit grey."""
    if not data.startswith(PNG_START) or data[12:16] != b"IHDR" or data.rfind(PNG_END, 33) < 0:
        return None
    depth_and_colour = data[24:26]
    size = int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    return size if depth_and_colour != b"\x10\0" and min(size) > 0 else None


def picture_size(data: bytes, *, path: str) -> tuple[int, int]:
    """(height, width) of a JPEG or an 8-bit PNG, whatever its name says (ImageNet has a PNG named .JPEG).

    From the header, in a few microseconds. Raises: DataError if it is neither, cut off, or far too large.
    """
    size = jpeg_size(data) or png_size(data)
    if size is None or _is_too_large(size):
        picture = open_picture(data, path=path)  # which says what is wrong with it
        size = picture.height, picture.width
    return size


def _is_too_large(size: tuple[int, int]) -> bool:
    """Pillow refuses it: decoded it would fill the memory."""
    most_pixels = Image.MAX_IMAGE_PIXELS
    return most_pixels is not None and size[0] * size[1] > 2 * most_pixels


def open_picture(data: bytes, *, path: str) -> Image.Image:
    """Decode a picture completely, in its own mode and without applying its EXIF orientation.

    Raises: DataError naming path if it is cut off or corrupt; UnsupportedPictureError if it is not an 8-bit
    JPEG or PNG, or far too large.
    """
    try:
        picture = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: is not a picture; {_ADVICE}") from error
    except Image.DecompressionBombError as error:  # more than 179 megapixels
        raise UnsupportedPictureError(f"{path}: cannot be read as a picture ({error}); {_ADVICE}") from error
    except OSError as error:  # cut off within the header
        raise DataError(f"{path}: cannot be read as a picture ({error}); {_ADVICE}") from error
    if picture.format not in ("JPEG", "MPO", "PNG") or picture.mode.startswith("I"):
        kind = f"{picture.format} in mode {picture.mode}"
        raise UnsupportedPictureError(f"{path}: is {kind}; save it as 8-bit JPEG or PNG")
    try:
        picture.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: cannot be decoded ({error}); {_ADVICE}") from error
    if picture.format == "PNG" and PNG_END not in data:  # Pillow does not mind, DALI does
        raise DataError(f"{path}: is cut off: its end mark is missing; {_ADVICE}")
    return picture


class EncodedReader:
    """Turns requests into encoded batches with its own threads, ahead of whoever decodes them."""

    def __init__(
        self,
        source: PictureSource,
        crop: Crop,
        *,
        microbatch_size: int,
        num_threads: int,
        prefetch_batches: int,
    ) -> None:
        self._source = source
        self._crop = crop
        self._microbatch_size = microbatch_size
        self._num_threads = num_threads
        self._prefetch_batches = prefetch_batches

    def read(self, requests: Iterable[Request]) -> Generator[EncodedBatch, None, None]:
        """Yield one batch per request, in order. Raises: DataError naming the picture."""
        return ahead(self._read_all(requests), depth=self._prefetch_batches)

    def close(self) -> None:
        """Release the source's open files; reading again is possible."""
        self._source.close()

    def _read_all(self, requests: Iterable[Request]) -> Iterator[EncodedBatch]:
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="bigbatch-read") as threads:
            for request in requests:
                yield self._read_one(request, threads)

    def _read_one(self, request: Request, threads: ThreadPoolExecutor) -> EncodedBatch:
        """Raises: ValueError if the request has not microbatch_size samples."""
        if len(request.indices_B) != self._microbatch_size:
            raise ValueError(f"got {len(request.indices_B)} samples, microbatch_size is {self._microbatch_size}")
        positions = request.indices_B.tolist()
        # one task per thread, not per file: a task costs as much as reading a cached file
        parts = [positions[part :: self._num_threads] for part in range(self._num_threads)]
        pictures: list = [None] * len(positions)
        for part, read in enumerate(threads.map(self._read_part, parts)):
            pictures[part :: self._num_threads] = read
        sizes_B2 = np.array([size for _, size in pictures], np.int64)
        boxes_B4, flips_B = self._crop(request.epoch, request.indices_B, sizes_B2)
        return EncodedBatch(
            jpegs=[data for data, _ in pictures],
            names=[self._source.name(position) for position in positions],
            boxes_B4=boxes_B4,
            flips_B=flips_B,
            labels_B=self._source.labels_N[request.indices_B],
            valid_B=request.valid_B,
        )

    def _read_part(self, positions: list[int]) -> list[tuple[bytes, Sequence[int]]]:
        """The pictures, each with the size that the source knows or else its header tells."""
        source, read = self._source, []
        known_B2 = source.sizes(np.array(positions, np.int64))
        sizes = [None] * len(positions) if known_B2 is None else known_B2.tolist()
        for position, size in zip(positions, sizes, strict=True):
            data = source.read(position)
            read.append((data, size or picture_size(data, path=source.name(position))))
        return read
