"""Types that connect input and training loop: requests, batches, image sources and loaders."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bigbatch.errors import DataError

if TYPE_CHECKING:  # torch takes seconds to import, which processes that only read images need not spend
    import torch
    from torch import Tensor

    from bigbatch.trainer.config.sections import DataConfig


SPLITS = ("train", "val")
"""Folders, lists and shards of a data set are divided into these."""


def written_keys(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dataclass's fields under the key names of published files, as asdict's dict_factory.

    Those files keep their keys although the fields were renamed.
    """
    former = {"images": "pictures", "num_images": "num_pictures"}
    return {former.get(name, name): value for name, value in fields}


@dataclass(frozen=True)
class Request:
    """Asks for one microbatch: a pure function of (seed, epoch, step, rank, world size).

    epoch and indices_B (int64) decide the random draws; indices_B % the split's size are positions in the split, more
    than one index for an image that is drawn again in its epoch. valid_B (bool) is False for a sample that only pads
    the batch to its fixed size and must not be counted.
    """

    epoch: int
    indices_B: np.ndarray
    valid_B: np.ndarray


@dataclass(frozen=True)
class BadImage:
    """An image that could not be used."""

    position: int
    """Position in its split, independent of the data's folder."""
    reason: str
    """Path and fault of the image."""


def require_few_bad_images(reasons: Sequence[str], *, max_skipped: int | None) -> None:
    """Raise DataError if all ranks together met more bad images than may be skipped."""
    if len(reasons) > (max_skipped or 0):
        raise too_many_bad_images(len(reasons), max_skipped=max_skipped or 0, last=reasons[-1])


def too_many_bad_images(number: int, *, max_skipped: int, last: str) -> DataError:
    """Return the error that ends a run with more bad images than it may skip."""
    return DataError(
        f"{number} images are bad, and data.max_skipped={max_skipped}: `bigbatch data check` lists all; the last is "
        f"{last}"
    )


@dataclass(frozen=True)
class Batch:
    """Holds images as uint8 in channels-last memory (B, 3, H, W), class indices (B, int64) and validity (B, bool).

    The tensors belong to the caller until the next batch is drawn from the loader's iterator.
    """

    images_BCHW: "Tensor"
    labels_B: "Tensor"
    valid_B: "Tensor"
    """False if a sample is padding, or replaces a bad image."""
    request: Request
    replaced: tuple[BadImage, ...] = ()
    """Bad images, each replaced by the next usable image of the split."""
    positions: Sequence[int] | None = None
    """Positions in the split of the images that were read; None: they are the request's indices."""


Crop = Callable[[int, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(epoch, indices_B, sizes_B2) -> (boxes_B4 int32, flips_B bool).

sizes are (height, width) in pixels; of the upright image with data.exif_orientation, else as stored. Boxes are
(top, left, height, width) inside it. Every draw depends on (seed, epoch, index) alone."""

ImageSize = Callable[[int], int]
"""epoch -> height and width of its images, in pixels."""


class ImageSource(Protocol):
    """Encoded images of one split in class folders, a list or packed shards."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the class names in the order of the labels."""

    @property
    def labels_N(self) -> np.ndarray:
        """Return the position of each image's class in classes, int64 (N)."""

    def __len__(self) -> int: ...

    def name(self, position: int) -> str:
        """Return the image's path for messages, without I/O."""

    def read(self, position: int) -> bytes:
        """Return the image's encoded bytes; callable from any thread. Raises: StorageError naming the image."""

    def sizes(self, positions_B: np.ndarray) -> np.ndarray | None:
        """Return (height, width) of each image, int64 (B, 2), without I/O; None if only the image files tell them."""

    def close(self) -> None:
        """Release open files; safe to call twice, and a later read opens them again."""


class Loader(Protocol):
    """Turns requests into batches, in order, ahead of the consumer."""

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request, in the order of the requests; may end the iterator of an earlier load.

        Raises: DataError naming the path.
        """

    def close(self) -> None:
        """Stop background work; safe to call twice, and with an iterator half consumed."""


@dataclass(frozen=True, kw_only=True)
class LoaderSetup:
    """What a loader is made from: the images of one split, and what to make of them."""

    source: ImageSource
    crop: Crop
    image_size: ImageSize
    microbatch_size: int
    """Images of each request."""
    device: "torch.device"
    """The model's device; a loader may leave images on the host."""
    data: "DataConfig"
    """The config's section data: number of threads, batches to prepare ahead, limits on bad images."""

    @property
    def max_pixels(self) -> int:
        """Return the limit of an image's pixels."""
        return round(1e6 * self.data.max_megapixels)
