"""Detect an encoded image's format and size, and whether it can be decoded."""

import io
from collections.abc import Sequence

from PIL import Image, UnidentifiedImageError

from bigbatch.errors import DataError
from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.input.image_files import FORMATS

# start-of-frame markers: 0xC0..0xCF without DHT (C4), JPG (C8) and DAC (CC)
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_START_OF_SCAN = 0xDA
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
_ADVICE = "replace or remove it"
_FORMATS = tuple(dict.fromkeys(FORMATS.values()))
MAX_PIXELS = round(1e6 * DataConfig.max_megapixels)
"""Default limit of an image's pixels: half a megabyte of PNG may hold 600 million, which take 2.4 GB decoded."""


def excess_bytes(num_bytes: int, *, max_pixels: int = MAX_PIXELS) -> str:
    """Return why so many bytes are no encoded image, as the header of a tar member may claim any length; else ""."""
    most = 4 * max_pixels  # decoded RGBA takes as much
    if num_bytes <= most:
        return ""
    return f"claims {num_bytes:,} bytes, more than an image of {max_pixels / 1e6:g} megapixels takes ({most:,})"


class UnsupportedImageError(DataError):
    """An intact image of a format that no loader supports."""


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Read (height, width) from a JPEG's frame header in a few microseconds; None if it is not a complete JPEG.

    None also for two frame headers, of which decoders choose different ones.
    """
    if data[:2] != b"\xff\xd8":
        return None
    at, length, size = 2, len(data), None
    while at + 9 <= length and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker == _START_OF_SCAN:
            # coded data never contains an end marker, so a file without one after this header is cut off
            return size if size and min(size) > 0 and data.rfind(b"\xff\xd9", at) >= 0 else None
        if marker in _START_OF_FRAME:
            if size is not None:
                return None
            size = int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def png_size(data: bytes) -> tuple[int, int] | None:
    """Read (height, width) from a PNG's header; None if it is not a complete PNG, or one of 16-bit grey."""
    if not data.startswith(PNG_START) or data[12:16] != b"IHDR" or data.rfind(PNG_END, 33) < 0:
        return None
    depth_and_colour = data[24:26]
    size = int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    return size if depth_and_colour != b"\x10\0" and min(size) > 0 else None


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Read (height, width) from a WebP's header, lossy, lossless or extended; None if it is not a complete WebP."""
    kind = data[12:16]
    # the size in the RIFF header leaves out the eight bytes up to its own end
    if not is_webp(data) or len(data) < max(25, 8 + int.from_bytes(data[4:8], "little")):
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
    """Return whether these first bytes are those of a WebP."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def require_pixels(size: Sequence[int], *, path: str, max_pixels: int) -> None:
    """Raise UnsupportedImageError naming path if an image of (height, width) has more pixels."""
    height, width = size
    if height * width > max_pixels:
        raise UnsupportedImageError(
            f"{path}: has {width} x {height} pixels, more than {max_pixels / 1e6:g} megapixels; shrink or remove it, "
            "or raise data.max_megapixels (--max-megapixels)"
        )


def encoded_size(data: bytes, *, path: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Read (height, width) of a JPEG, WebP or 8-bit PNG from its header, in a few microseconds.

    Ignores the suffix (ImageNet has a PNG named .JPEG). Raises: DataError for other formats, a cut or too large image.
    """
    size = _stated_size(data)
    if size is None:
        image = open_image(data, path=path, max_pixels=max_pixels)  # its error says what is wrong
        size = image.height, image.width
    if size[0] * size[1] > max_pixels:
        require_pixels(size, path=path, max_pixels=max_pixels)
    return size


def _stated_size(data: bytes) -> tuple[int, int] | None:
    return jpeg_size(data) or png_size(data) or webp_size(data)


def open_image(data: bytes, *, path: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image completely, in its own mode and without applying its EXIF orientation.

    Raises: DataError naming path if it is cut off or corrupt; UnsupportedImageError if it is not of 8 bits, or has more
    than max_pixels.
    """
    image = open_header(data, path=path, max_pixels=max_pixels)
    if image.mode.startswith("I"):
        kind = f"{image.format} in mode {image.mode}"
        raise UnsupportedImageError(f"{path}: is {kind}; save it as 8-bit JPEG, PNG or WebP")
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # damage may raise anything, such as IndexError
        raise DataError(f"{path}: cannot be decoded ({error}); {_ADVICE}") from error
    image.info.pop("transparency", None)  # conversions to RGB drop it, and some of them warn
    if image.format == "PNG" and PNG_END not in data:  # Pillow does not mind, DALI does
        raise DataError(f"{path}: is cut off: its end mark is missing; {_ADVICE}")
    return image


def open_header(data: bytes, *, path: str, max_pixels: int) -> Image.Image:
    """Open an image; its pixels are decoded on first use. Raises: DataError, as open_image does."""
    # before Pillow opens it, which already allocates memory for a WebP
    stated = _stated_size(data)
    if stated is None and is_webp(data):
        raise DataError(f"{path}: cannot be read as an image (its WebP header is cut off or damaged); {_ADVICE}")
    require_pixels(stated or (0, 0), path=path, max_pixels=max_pixels)
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: is not an image in JPEG, PNG or WebP; {_ADVICE}") from error
    except Image.DecompressionBombError as error:
        raise UnsupportedImageError(f"{path}: cannot be read as an image ({error}); {_ADVICE}") from error
    except MemoryError:
        raise
    except Exception as error:  # cut off or damaged within the header
        raise DataError(f"{path}: cannot be read as an image ({error}); {_ADVICE}") from error
    # again by Pillow's size, in case the header could not be read above
    require_pixels((image.height, image.width), path=path, max_pixels=max_pixels)
    return image
