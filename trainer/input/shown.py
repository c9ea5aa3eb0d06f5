"""Images as viewers show them: upright by EXIF, and over a background. data.exif_orientation and data.background."""

import io
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image, ImageOps

from bigbatch.errors import DataError
from bigbatch.trainer.input.base import Crop, ImageSource
from bigbatch.trainer.input.formats import MAX_PIXELS, open_header, open_image

if TYPE_CHECKING:
    from torch import Tensor

    from bigbatch.trainer.config.sections import DataConfig

ORIENTATION = 0x0112
MAY_STATE_IT = (b"Exif", b"eXIf", b"EXIF", b"exif", b"rientation")
"""A file without any of these, as in JPEG, PNG, WebP and XMP, states no orientation."""
TURNS = {
    1: (False, ()),
    2: (False, (1,)),
    3: (False, (0, 1)),
    4: (False, (0,)),
    5: (True, ()),
    6: (True, (1,)),
    7: (True, (0, 1)),
    8: (True, (0,)),
}
"""EXIF orientation -> whether rows and columns of the stored image are exchanged, and axes to flip after that."""
MIRRORED = np.array([0, 2, 1, 4, 3, 6, 5, 8, 7], np.uint8)
"""EXIF orientation -> the one that also mirrors the upright image."""

Pixels = TypeVar("Pixels", "np.ndarray[Any, Any]", "Tensor")


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an open image, as Pillow's exif_transpose reads it: 1 to 8, 1 if there is none."""
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # older versions of Pillow raise for broken EXIF
        return 1
    return orientation if orientation in TURNS else 1


def is_transparent(image: Image.Image) -> bool:
    """Return whether an image, open and not yet decoded, has an alpha channel or a transparent colour."""
    return image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info


def turned(pixels: Pixels, orientation: int) -> Pixels:
    """Return the upright form of an array (H, W, ...) of that orientation, as a view if it can be one."""
    are_exchanged, axes = TURNS[orientation]
    pixels = pixels.swapaxes(0, 1) if are_exchanged else pixels
    return np.flip(pixels, axes) if isinstance(pixels, np.ndarray) else pixels.flip(axes)


def turn_(images_BHWC: "Tensor", orientations_B: np.ndarray) -> None:
    """Turn images that were resized as stored, in place; those up to 2 are finished."""
    for row in np.flatnonzero(orientations_B > 2).tolist():
        images_BHWC[row] = turned(images_BHWC[row], int(orientations_B[row])).contiguous()


def upright_crop(crop: Crop, images: Sequence[bytes]) -> Crop:
    """Return crop for these encoded images, drawn in the upright image: boxes are those in the stored one.

    Flips become orientations - 1: a loader resizes the stored box and then turns it, since squares are turned last.
    """
    orientations_B = np.array([stated_orientation(data) for data in images], np.uint8)

    def turned_crop(epoch: int, indices_B: np.ndarray, sizes_B2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        are_exchanged_B1 = (orientations_B > 4)[:, None]
        upright_B2 = np.where(are_exchanged_B1, sizes_B2[:, ::-1], sizes_B2)
        boxes_B4, flips_B = crop(epoch, indices_B, upright_B2)
        flipped_axes_B2 = np.array([[axis in TURNS[each][1] for axis in (0, 1)] for each in orientations_B.tolist()])
        starts_B2, extents_B2 = boxes_B4[:, :2], boxes_B4[:, 2:]
        starts_B2 = np.where(flipped_axes_B2, upright_B2 - starts_B2 - extents_B2, starts_B2)
        stored = [np.where(are_exchanged_B1, each[:, ::-1], each) for each in (starts_B2, extents_B2)]
        codes_B = np.where(flips_B, MIRRORED[orientations_B], orientations_B)
        return np.concatenate(stored, axis=1).astype(np.int32), codes_B - 1

    return turned_crop


def stated_orientation(data: bytes) -> int:
    """Return orientation_of an encoded image; 1 also for one that cannot be read."""
    if not any(word in data for word in MAY_STATE_IT):
        return 1
    try:
        return orientation_of(open_header(data, path="", max_pixels=sys.maxsize))
    except DataError:  # the decoder names the image and its fault
        return 1


def orientation_option(data: bytes) -> dict[str, Image.Exif]:
    """Return Pillow's option to save an image with the orientation that this encoded one states, if it states one."""
    tags = Image.Exif()
    tags[ORIENTATION] = stated_orientation(data)
    return {"exif": tags} if tags[ORIENTATION] > 1 else {}


class ShownImages:
    """ImageSource that gives transparent images over a background, and with is_turned rotated ones upright, as PNG.

    Other images keep their bytes.
    """

    def __init__(self, source: ImageSource, data: "DataConfig", *, is_turned: bool = True) -> None:
        self._source, self._background = source, data.background
        self._is_turned = data.exif_orientation and is_turned
        self._max_pixels = round(1e6 * data.max_megapixels)
        self.classes, self.labels_N = source.classes, source.labels_N
        self.name: Callable[[int], str] = source.name
        self.close: Callable[[], None] = source.close

    def __len__(self) -> int:
        return len(self._source)

    def read(self, position: int) -> bytes:
        """Return the image's bytes, perhaps as PNG. Raises: as the source's method; DataError for a damaged image."""
        data = self._source.read(position)
        image = shown(
            data,
            path=self.name(position),
            background=self._background,
            is_turned=self._is_turned,
            max_pixels=self._max_pixels,
        )
        if image is None:
            return data
        still = {} if self._is_turned else orientation_option(data)  # the loader may turn it
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=0, **still)  # decoded at once: to compress it would take longer
        return buffer.getvalue()

    def sizes(self, positions_B: np.ndarray) -> np.ndarray | None:
        """Return what the source knows, which is the stored size."""
        return None if self._is_turned else self._source.sizes(positions_B)


def shown(
    data: bytes, *, path: str, background: str | None, is_turned: bool, max_pixels: int = MAX_PIXELS
) -> Image.Image | None:
    """Decode an image over background (null: transparency is ignored), upright if is_turned, as RGB.

    None if it has neither transparent pixels nor an orientation that asks for it. Raises: DataError.
    """
    is_turned = is_turned and stated_orientation(data) > 1
    is_over = background is not None and not data.startswith(b"\xff\xd8")
    if is_over:
        is_over = is_transparent(header := open_header(data, path=path, max_pixels=max_pixels))
    if not is_over and not is_turned:
        return None
    image = open_image(data, path=path, max_pixels=max_pixels)
    image = ImageOps.exif_transpose(image) if is_turned else image
    if is_over:
        if "transparency" in header.info:  # which open_image drops
            image.info["transparency"] = header.info["transparency"]
        above = image.convert("RGBA")
        if not is_turned and above.getchannel("A").getextrema() == (255, 255):  # as often, all is opaque
            return None
        image = Image.alpha_composite(Image.new("RGBA", above.size, background), above)
    return image.convert("RGB")
