"""Examine every image of a data set as the loaders would, in many processes."""

import hashlib
import os
import warnings
from collections.abc import Mapping

import numpy as np

from bigbatch.errors import DataError, StorageError
from bigbatch.trainer.input.base import ImageSource
from bigbatch.trainer.input.formats import (
    PNG_END,
    PNG_START,
    UnsupportedImageError,
    encoded_size,
    is_webp,
    jpeg_size,
    open_header,
    open_image,
    webp_size,
)
from bigbatch.trainer.input.image_files import FORMATS
from bigbatch.trainer.input.shown import is_transparent, orientation_of

PART_IMAGES = 64
"""Images per task of a process: half a second of decoding, so that progress moves and a task's overhead is small."""

TRAITS = {
    # trait of an image -> what the loaders do with it
    "progressive JPEG": "decoded as any other, more slowly",
    "grayscale": "red, green and blue all get the one channel",
    "CMYK": "converted to RGB by the plain formula, without a colour profile",
    "named as another format": "decoded by content, whatever its name says",
    "EXIF rotation": "used as stored; data.exif_orientation: true turns it",
    "16 bit": "reduced to 8 bits",
    "palette": "expanded to RGB",
    "transparency": "ignored: the colour under it shows; data.background: white shows that instead",
    "several images in one file": "the first is used",
}

IMAGE = np.dtype(
    [("digest", "u8", 2), ("num_bytes", "i8"), ("sides", "i4", 2), ("format", "S12"), ("traits", "u2"), ("is_ok", "?")]
)
"""One row per image; sides are (height, width), traits a bit for each of TRAITS in order, format such as JPEG RGB.

sides, format and traits are zero unless is_ok. 47 bytes, so that a million images take 47 MB."""

Part = tuple[str, np.ndarray, list[tuple[str, str]]]
"""A split, a row of dtype IMAGE for each of some of its images, in order, and (kind, reason) of each bad one.

A reason is one line, which begins with the image's path."""


def kind_of_fault(data: bytes, error: Exception) -> str:
    """Return the likely kind of fault of a file for which the decoder raised error."""
    if not data:
        return "empty file"
    for start, end in ((b"\xff\xd8\xff", b"\xff\xd9"), (PNG_START[:4], PNG_END)):
        if data.startswith(start):
            if end not in data[len(start) :]:
                return "cut off image"
            return "unsupported image" if isinstance(error, UnsupportedImageError) else "damaged image"
    if is_webp(data):
        if isinstance(error, UnsupportedImageError):
            return "unsupported image"
        return "cut off image" if webp_size(data) is None else "damaged image"
    if data[:100].lstrip().startswith(b"<"):
        return "HTML or XML instead of an image"
    return "neither JPEG, PNG nor WebP"


def examine(data: bytes, *, path: str, decode: bool, max_pixels: int) -> tuple[tuple[int, int], str, int]:
    """Return (height, width), format and traits of a stored image; with decode False from its headers alone.

    Raises: DataError naming path.
    """
    if decode:
        decoded = open_image(data, path=path, max_pixels=max_pixels)
        size = jpeg_size(data) or (decoded.height, decoded.width)
    else:
        size = encoded_size(data, path=path, max_pixels=max_pixels)
    image = open_header(data, path=path, max_pixels=max_pixels)  # the decoded one forgets a transparent colour
    kind = "JPEG" if image.format == "MPO" else str(image.format)
    mode, info = image.mode, image.info
    suffix = os.path.splitext(path)[1].lower()  # an image in a shard has none
    found = {
        "progressive JPEG": "progressive" in info,
        "grayscale": mode in ("1", "L", "LA"),
        "CMYK": mode == "CMYK",
        "named as another format": FORMATS.get(suffix, kind) != kind,
        "16 bit": kind == "PNG" and data[24] == 16,  # the bit depth in PNG's first chunk
        "palette": mode in ("P", "PA"),
        "transparency": is_transparent(image),
        "several images in one file": image.format == "MPO" or getattr(image, "is_animated", False),
        "EXIF rotation": orientation_of(image) > 1,
    }
    return size, f"{kind} {mode}", sum(1 << bit for bit, trait in enumerate(TRAITS) if found[trait])


def examine_part(splits: Mapping[str, ImageSource], decode: bool, max_pixels: int, task: tuple[str, range]) -> Part:
    """Read and examine the images of a task (split, positions); a bad one becomes a fault."""
    split, positions = task
    images, rows_N = splits[split], np.zeros(len(positions), IMAGE)
    faults: list[tuple[str, str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about EXIF and very large images
        for row, position in enumerate(positions):
            path = images.name(position)
            try:
                data = images.read(position)
            except (OSError, DataError) as error:
                faults.append(("unreadable file", reason_of(path, error)))
                continue
            rows_N[row]["num_bytes"] = len(data)
            try:
                found = examine(data, path=path, decode=decode, max_pixels=max_pixels)
                digest = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.uint64)
                rows_N[row] = (digest, len(data), *found, True)
            except Exception as error:  # one bad file must not end the check, and decoders may raise anything
                faults.append((kind_of_fault(data, error), reason_of(path, error)))
    return split, rows_N, faults


def reason_of(path: str, error: Exception) -> str:
    """Return one line on why an image cannot be used."""
    # an existing path that cannot be read, such as a folder; an image in a shard has no path
    is_there = isinstance(error, StorageError) and os.path.lexists(path)
    if isinstance(error, DataError) and not is_there:
        return str(error.args[0])
    cause = error.__cause__ if is_there else error
    what = (isinstance(cause, OSError) and cause.strerror) or " ".join(str(cause).split())
    return f"{path}: cannot be used ({what}); replace or remove it"
