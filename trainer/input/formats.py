"""What an encoded picture is: its kind, its size, and whether it can be decoded."""

import io

from PIL import Image, UnidentifiedImageError

from bigbatch.errors import DataError

# start-of-frame markers: 0xC0..0xCF without DHT (C4), JPG (C8) and DAC (CC)
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
_ADVICE = "replace or remove it"
SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
"""The formats that all loaders take, by Pillow's names, and how a file of each is called."""


class UnsupportedImageError(DataError):
    """A picture may be whole, but is of a kind that no loader takes."""


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Read (height, width) from a JPEG's frame header in a few microseconds; None if it is no complete JPEG."""
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
    """Read (height, width) from a PNG's header; None if it is no complete PNG, or one of 16-bit grey."""
    if not data.startswith(PNG_START) or data[12:16] != b"IHDR" or data.rfind(PNG_END, 33) < 0:
        return None
    depth_and_colour = data[24:26]
    size = int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    return size if depth_and_colour != b"\x10\0" and min(size) > 0 else None


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Read (height, width) from a WebP's header, lossy, lossless or extended; None if it is no complete WebP."""
    kind = data[12:16]
    # the size in the RIFF header leaves out the eight bytes up to its own end
    if not is_webp(data) or len(data) < max(30, 8 + int.from_bytes(data[4:8], "little")):
        return None
    if kind == b"VP8 ":
        size = int.from_bytes(data[28:30], "little") & 0x3FFF, int.from_bytes(data[26:28], "little") & 0x3FFF
        return size if data[23:26] == b"\x9d\x01\x2a" and min(size) > 0 else None
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)) if data[20] == 0x2F else None
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[27:30], "little"), 1 + int.from_bytes(data[24:27], "little")
    return None


def is_webp(data: bytes) -> bool:
    """Tell by its first bytes whether a file is, or begins, a WebP."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def encoded_size(data: bytes, *, path: str) -> tuple[int, int]:
    """Read (height, width) of a JPEG, WebP or 8-bit PNG, whatever its name says (ImageNet has a PNG named .JPEG).

    From the header, in a few microseconds. Raises: DataError if it is none of them, cut off, or far too large.
    """
    size = jpeg_size(data) or png_size(data) or webp_size(data)
    if size is None or _is_too_large(size):
        image = open_image(data, path=path)  # which says what is wrong with it
        size = image.height, image.width
    return size


def _is_too_large(size: tuple[int, int]) -> bool:
    """Tell whether Pillow refuses it: decoded it would fill the memory."""
    most_pixels = Image.MAX_IMAGE_PIXELS
    return most_pixels is not None and size[0] * size[1] > 2 * most_pixels


def open_image(data: bytes, *, path: str) -> Image.Image:
    """Decode a picture completely, in its own mode and without applying its EXIF orientation.

    Raises: DataError naming path if it is cut off or corrupt; UnsupportedImageError if it is not an 8-bit
    JPEG, PNG or WebP, or far too large.
    """
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: is not a picture; {_ADVICE}") from error
    except Image.DecompressionBombError as error:  # more than 179 megapixels
        raise UnsupportedImageError(f"{path}: cannot be read as a picture ({error}); {_ADVICE}") from error
    except (OSError, ValueError) as error:  # cut off or damaged within the header
        raise DataError(f"{path}: cannot be read as a picture ({error}); {_ADVICE}") from error
    if image.format not in (*SUFFIXES, "MPO") or image.mode.startswith("I"):
        kind = f"{image.format} in mode {image.mode}"
        raise UnsupportedImageError(f"{path}: is {kind}; save it as 8-bit JPEG, PNG or WebP")
    try:
        image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: cannot be decoded ({error}); {_ADVICE}") from error
    if image.format == "PNG" and PNG_END not in data:  # Pillow does not mind, DALI does
        raise DataError(f"{path}: is cut off: its end mark is missing; {_ADVICE}")
    return image
