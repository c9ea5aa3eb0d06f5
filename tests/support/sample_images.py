"""Encoded images for tests of the input, and where the real ones lie."""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

REAL_DATA = Path(
    os.environ.get("BIGBATCH_REAL_DATA") or Path(__file__).resolve().parents[2].parent / "shared/data/imagenet-sample"
)


def smooth_image(seed: int, width: int = 150, height: int = 110) -> Image.Image:
    """Smooth colours, as in a photograph: on noise alone two resizers differ more than on any image."""
    noise = np.random.default_rng(seed).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """Return the bytes of a file of that format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_bad_tables(jpeg: bytes) -> bytes:
    """Impossible Huffman code lengths: the frame header and the end marker stay, only decoding shows the damage."""
    at = jpeg.index(b"\xff\xc4") + 5
    return jpeg[:at] + b"\xff" * 16 + jpeg[at + 16 :]


def png_of(*parts: tuple[bytes, bytes]) -> bytes:
    """A PNG of (kind, content), which may state anything."""
    framed = (struct.pack(">I", len(body)) + kind + body for kind, body in parts)
    sums = (struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(part + total for part, total in zip(framed, sums, strict=True))


def exif(orientation: int) -> bytes:
    """EXIF data that says how to turn the image for display."""
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def write(root: Path, files: dict[str, bytes]) -> Path:
    """Path below root -> content; returns root."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def touch(root: Path, *names: str) -> Path:
    """Write empty files below root; returns root."""
    return write(root, dict.fromkeys(names, b""))


def resized_crop(image_CHW: Tensor, box: list[int], *, size: int) -> Tensor:
    """torchvision's resized_crop of (top, left, height, width) by torch's integer kernel, in uint8, on any CPU.

    torchvision itself takes that kernel only where there is AVX2, and computes in fp32 elsewhere.
    """
    top, left, height, width = box
    cut_1CHW = image_CHW[None, :, top : top + height, left : left + width]
    return F.interpolate(cut_1CHW, size=(size, size), mode="bilinear", antialias=True)[0]
