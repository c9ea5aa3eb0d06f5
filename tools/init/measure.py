"""Measure a sample of the images: sides, mean and standard deviation of pixels, and unusable images."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from bigbatch.errors import DataError
from bigbatch.trainer.datasets.check import Spread, spread
from bigbatch.trainer.datasets.check_image import reason_of
from bigbatch.trainer.datasets.processes import Advance, in_parallel, show_nothing
from bigbatch.trainer.input.base import ImageSource
from bigbatch.trainer.input.formats import MAX_PIXELS, open_image
from bigbatch.trainer.input.order import epoch_order
from bigbatch.trainer.input.shown import shown, stated_orientation

PART_IMAGES = 32
LEVELS = np.arange(256) / 255
BACKGROUND = "white"
"""Behind transparent pixels: what web pages and documents have there."""


@dataclass(frozen=True)
class SampleStatistics:
    """Measurements of a sample of both splits; mean and std are those of its training images."""

    num_images: int
    """Number of examined images, good or not."""
    num_averaged: int
    mean: tuple[float, ...]
    """Mean of red, green and blue on the scale 0 to 1; images of all sizes have the same weight."""
    std: tuple[float, ...]
    """Standard deviation of the pixels around that mean, with the same weights."""
    short_side_pixels: Spread
    long_side_pixels: Spread
    faults: dict[str, dict[int, str]]
    """Split -> position of an unusable image -> a line that begins with its path."""
    num_rotated: int = 0
    num_transparent: int = 0
    """Images with an EXIF orientation that turns them; images with transparent pixels, measured over BACKGROUND."""

    @property
    def num_usable(self) -> int:
        return self.num_images - sum(map(len, self.faults.values()))


def measure(
    splits: Mapping[str, ImageSource],
    *,
    max_images: int,
    seed: int,
    num_workers: int = 1,
    max_pixels: int = MAX_PIXELS,
    on_progress: Advance = show_nothing,
) -> SampleStatistics:
    """Decode and measure at most max_images images, drawn by seed from all splits; larger than max_pixels is unusable.

    Raises: DataError if no training image of the sample is usable; ConfigError for an illegal num_workers.
    """
    total = sum(map(len, splits.values()))
    chosen_N = np.sort(epoch_order(seed=seed, epoch=0, num_samples=total)[:max_images])
    tasks: list[tuple[str, list[int]]] = []
    first = 0
    for split, images in splits.items():
        own_N = chosen_N[(chosen_N >= first) & (chosen_N < first + len(images))] - first
        tasks += [(split, own_N[at : at + PART_IMAGES].tolist()) for at in range(0, len(own_N), PART_IMAGES)]
        first += len(images)
    rows: list[np.ndarray] = []
    sides: list[np.ndarray] = []
    faults: dict[str, dict[int, str]] = {split: {} for split in splits}
    num_done, marks_2 = 0, np.zeros(2, int)
    for (split, positions), (found_N8, marked_2, bad) in zip(
        tasks, in_parallel(partial(_examine, dict(splits), max_pixels), tasks, num_workers=num_workers), strict=True
    ):
        marks_2 += marked_2
        sides.append(found_N8[:, :2])
        faults[split].update(bad)
        if split == "train":
            rows.append(found_N8[:, 2:])
        num_done += len(positions)
        on_progress(num_done, len(chosen_N))
    moments_N6 = np.concatenate([np.empty((0, 6)), *rows])
    if not len(moments_N6):
        reasons = [reason for bad in faults.values() for reason in bad.values()]
        raise DataError(f"no image of {num_done:,} is usable; the first: {reasons[0] if reasons else 'none trains'}")
    means_3, squares_3 = np.split(moments_N6.mean(axis=0), 2)
    sides_N2 = np.concatenate(sides)
    return SampleStatistics(
        num_images=num_done,
        num_averaged=len(moments_N6),
        mean=tuple(means_3.tolist()),
        std=tuple(np.sqrt(np.maximum(squares_3 - means_3**2, 0)).tolist()),
        short_side_pixels=spread(sides_N2.min(axis=1).astype(int)),
        long_side_pixels=spread(sides_N2.max(axis=1).astype(int)),
        num_rotated=int(marks_2[0]),
        num_transparent=int(marks_2[1]),
        faults=faults,
    )


def _examine(
    splits: Mapping[str, ImageSource], max_pixels: int, task: tuple[str, list[int]]
) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Return (height, width, three means, three means of squares) of each usable image, and reasons for the others.

    Between them the numbers of rotated and of transparent images.
    """
    split, positions = task
    rows, marks_2, bad = [], np.zeros(2, int), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of EXIF and very large images
        for position in positions:
            path = splits[split].name(position)
            try:
                data = splits[split].read(position)
                over = shown(data, path=path, background=BACKGROUND, is_turned=False, max_pixels=max_pixels)
                image = over or open_image(data, path=path, max_pixels=max_pixels).convert("RGB")
            except Exception as error:  # a decoder may raise anything, and one bad file must not end the measurement
                bad[position] = reason_of(path, error)
            else:
                # counts of 256 levels: exact, and an image of any size costs no array of floats
                shares_C256 = np.reshape(image.histogram(), (3, 256)) / (image.height * image.width)
                marks_2 += (stated_orientation(data) > 1, over is not None)
                rows.append([image.height, image.width, *(shares_C256 @ LEVELS), *(shares_C256 @ LEVELS**2)])
    return np.reshape(rows, (-1, 8)), marks_2, bad
