"""Loader that decodes the whole split once into the device's or host's memory: for small images, such as CIFAR."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bigbatch.errors import DataError
from bigbatch.trainer.augment.crops import center_crop
from bigbatch.trainer.input.base import Batch, LoaderSetup, Request
from bigbatch.trainer.input.formats import open_image
from bigbatch.trainer.input.prepare_batch import on_device
from bigbatch.trainer.input.retry import PatientReads

SLICE_IMAGES = 4096
"""Images that are asked for at a time while the set is decoded."""


class ResidentLoader:
    """Gathers, shifts and flips images of image_size on the device; pixels outside of an image are black.

    Boxes may reach over the edge (padded_crop: torchvision's RandomCrop with padding) but must be of image_size.
    """

    def __init__(self, setup: LoaderSetup) -> None:
        """Decode the set; with data.resident_on=host it stays in the host's memory, and batches are made there.

        Raises: DataError naming the first image that is not of data.image_size, or one that cannot be read.
        """
        images_NHWC = _decode_all(setup)
        self._setup = setup
        self._images_NHWC = images_NHWC if setup.data.resident_on == "host" else images_NHWC.to(setup.device)
        self._is_open = True

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request, in order, until the loader is closed."""
        for request in requests:
            if not self._is_open:
                return
            yield self._gather(request)

    def uncropped(self) -> "ResidentLoader":
        """Return a loader of the same images in the same memory, uncropped and not flipped."""
        whole = copy.copy(self)
        whole._setup = replace(self._setup, crop=center_crop(fraction=1.0))
        return whole

    def in_microbatches_of(self, microbatch_size: int) -> "ResidentLoader":
        """Return a loader of the same images in the same memory, with microbatches of another size."""
        other = copy.copy(self)
        other._setup = replace(self._setup, microbatch_size=microbatch_size)
        return other

    def close(self) -> None:
        """End all iterators and free the device's memory."""
        self._is_open = False
        self._images_NHWC = self._images_NHWC[:0]

    def _gather(self, request: Request) -> Batch:
        """Return the batch. Raises: ValueError if it has not microbatch_size samples, or a box is not image_size."""
        setup = self._setup
        indices_B = request.indices_B % len(setup.source.labels_N)
        size = self._images_NHWC.shape[1]
        if len(indices_B) != setup.microbatch_size:
            raise ValueError(f"got {len(indices_B)} samples, microbatch_size is {setup.microbatch_size}")
        boxes_B4, flips_B = setup.crop(request.epoch, request.indices_B, np.full((len(indices_B), 2), size, np.int64))
        if (boxes_B4[:, 2:] != size).any():
            raise ValueError(f"the resident loader does not resize: every box must be {size} x {size}")
        images_BHWC = shifted(self._images_NHWC, indices_B=indices_B, tops_lefts_B2=boxes_B4[:, :2], flips_B=flips_B)
        return Batch(
            images_BCHW=on_device(images_BHWC, setup.device).permute(0, 3, 1, 2),
            labels_B=torch.from_numpy(setup.source.labels_N[indices_B]),
            valid_B=torch.from_numpy(request.valid_B),
            request=request,
            positions=indices_B.tolist(),
        )


def shifted(images_NHWC: Tensor, *, indices_B: np.ndarray, tops_lefts_B2: np.ndarray, flips_B: np.ndarray) -> Tensor:
    """Return square images, each shifted to its (top, left) and zero outside of the original, flipped if asked.

    No host sync: the index tables are made on the host, and copied to the device once per batch.
    """
    size = images_NHWC.shape[1]
    steps_S = np.arange(size)
    rows_BS = tops_lefts_B2[:, :1] + steps_S
    columns_BS = tops_lefts_B2[:, 1:] + np.where(flips_B[:, None], steps_S[::-1], steps_S)
    tables = np.stack([np.broadcast_to(indices_B[:, None], rows_BS.shape), rows_BS, columns_BS])
    indices_BS, rows_BS, columns_BS = on_device(tables, images_NHWC.device)
    rows_BS1, columns_B1S = rows_BS[:, :, None], columns_BS[:, None, :]
    inside_BSS = (rows_BS1 >= 0) & (rows_BS1 < size) & (columns_B1S >= 0) & (columns_B1S < size)
    last = size - 1
    # clamped to legal indices; the product below makes pixels outside black
    images_BSSC = images_NHWC[indices_BS[:, :1, None], rows_BS1.clamp(0, last), columns_B1S.clamp(0, last)]
    return images_BSSC * inside_BSS[..., None]


def _decode_all(setup: LoaderSetup) -> Tensor:
    """Decode every image of the split, uint8 (N, data.image_size, data.image_size, 3)."""
    index, data, image_size = setup.source, setup.data, setup.data.image_size
    reads = PatientReads(index, patience_seconds=data.patience_seconds)
    images_NHWC = np.empty((len(index), image_size, image_size, 3), np.uint8)

    def fill(first: int, row: int) -> None:
        position = first + row
        path = index.name(position)
        image = open_image(reads.read(position), path=path, max_pixels=setup.max_pixels)
        if image.size != (image_size, image_size):
            wide, high = image.size
            raise DataError(f"{path}: is {wide} x {high}, not {image_size} x {image_size}; use another loader")
        images_NHWC[position] = np.asarray(image.convert("RGB"))

    with reads.threads():
        reads.use_threads(data.num_threads)
        for first in range(0, len(index), SLICE_IMAGES):  # or a row each of millions of images would wait in memory
            positions = range(first, min(first + SLICE_IMAGES, len(index)))
            reads.finish(reads.begin(positions, partial(fill, first)))
    index.close()
    return torch.from_numpy(images_NHWC)
