"""The embedded data set of the quick start: ten classes of shapes and textures in ImageNet's folder layout.

Each image is a pure function of (seed, split, label, number). Colours, sign of the contrast, place, angle,
size, clutter and noise all vary, so a linear classifier on pixels fails where a small ResNet succeeds.
"""

import io
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from glob import escape
from pathlib import Path

import numpy as np
from PIL import Image

from bigbatch.errors import ConfigError, DataError
from bigbatch.files import as_json, parse_json, read_plain, write_new
from bigbatch.locks import share_lock, try_lock
from bigbatch.trainer.datasets.processes import Advance, in_parallel, show_nothing
from bigbatch.trainer.input.base import SPLITS

DATASET_VERSION = 1
"""Increase it with every change that alters a pixel: then folders of older versions are refused."""

MANIFEST = "manifest.json"
JPEG_QUALITY = 90
CHUNK_IMAGES = 50
MAX_PER_CLASS = 99_999
"""Most images of a class in a split: file names have five digits."""
UNFINISHED = ".unfinished"
_REMEDY = "delete the folder to generate it again, or name a new one"
LUMA_3 = np.array([0.299, 0.587, 0.114])

Shape = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""(u, v, rng) -> signed distance, negative inside and positive outside of a shape with radius of about 1."""


def _cross(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    half_width = rng.uniform(0.2, 0.3)
    short, long = np.minimum(np.abs(u), np.abs(v)), np.maximum(np.abs(u), np.abs(v))
    return np.maximum(short - half_width, long - 1.05)


def _stripes(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    frequency = rng.uniform(8, 11)
    return _in_patch(np.sin(frequency * u + rng.uniform(0, 6.28)) / frequency, u, v)


def _checkerboard(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    frequency = rng.uniform(5.5, 8)
    phase_u, phase_v = rng.uniform(0, 6.28, 2)
    return _in_patch(np.sin(frequency * u + phase_u) * np.sin(frequency * v + phase_v) / frequency, u, v)


def _dots(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    period = rng.uniform(0.5, 0.65)
    offset_u, offset_v = rng.uniform(0, period, 2)
    cell_u, cell_v = (u + offset_u) % period - period / 2, (v + offset_v) % period - period / 2
    return _in_patch(np.hypot(cell_u, cell_v) - rng.uniform(0.28, 0.34) * period, u, v)


def _spiral(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    frequency, handedness = rng.uniform(8, 11), rng.choice([-1, 1])
    return _in_patch(np.sin(frequency * np.hypot(u, v) + handedness * np.arctan2(v, u)) / frequency, u, v)


def _in_patch(distance: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Cut a texture to a disk a little larger than the shapes."""
    return np.maximum(distance, np.hypot(u, v) - 1.1)


SHAPES: dict[str, Shape] = {
    "checkerboard": _checkerboard,
    "crescent": lambda u, v, rng: np.maximum(np.hypot(u, v) - 1, rng.uniform(0.8, 0.95) - np.hypot(u - 0.5, v)),
    "cross": _cross,
    "disk": lambda u, v, rng: np.hypot(u, v) - 1,
    "dots": _dots,
    "ring": lambda u, v, rng: np.abs(np.hypot(u, v) - 0.8) - rng.uniform(0.12, 0.2),
    "spiral": _spiral,
    "square": lambda u, v, rng: np.maximum(np.abs(u), np.abs(v)) - 0.85,
    "stripes": _stripes,
    "triangle": lambda u, v, rng: np.maximum(-v, np.abs(u) * 0.866 + v * 0.5) - 0.62,
}
CLASSES = tuple(sorted(SHAPES))
"""Folder names; the position is the label, as in every reader that sorts folders."""


@dataclass(frozen=True)
class ShapesRecipe:
    """Settings that determine every byte of the data set; its manifest states them."""

    seed: int
    train_per_class: int
    val_per_class: int
    side_pixels: tuple[int, int]

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of images per class of each split."""
        return {"train": self.train_per_class, "val": self.val_per_class}


def render(*, seed: int, split: str, label: int, number: int, side_pixels: tuple[int, int] = (72, 112)) -> np.ndarray:
    """Draw one image: uint8, height x width x 3, both sides drawn from side_pixels (inclusive)."""
    # one generator per image, so that processes may draw images in any order
    rng = np.random.default_rng([seed, SPLITS.index(split), label, number])
    height, width = rng.integers(side_pixels[0], side_pixels[1] + 1, 2)
    radius_pixels = min(height, width) / 2
    y = (np.arange(height, dtype=np.float32)[:, None] - (height - 1) / 2) / radius_pixels
    x = (np.arange(width, dtype=np.float32)[None, :] - (width - 1) / 2) / radius_pixels
    back_3, front_3 = _colours(rng)
    image_HW3 = back_3 + _shading(x, y, rng)
    for _ in range(rng.integers(2, 6)):
        _paint_(image_HW3, _stroke(x, y, rng) * radius_pixels, rng.uniform(20, 235, 3))
    u, v, scale = _object_frame(x, y, rng)
    distance = SHAPES[CLASSES[label]](u, v, rng) * scale * radius_pixels
    _paint_(image_HW3, distance, front_3 + _shading(x, y, rng))
    image_HW3 += rng.standard_normal(image_HW3.shape, dtype=np.float32) * rng.uniform(2, 10)
    return image_HW3.clip(0, 255).astype(np.uint8)


def _colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw two colours of random hue, 80 to 140 grey levels apart in luminance.

    In one image of five the object is darker than its background; otherwise mean brightness would be a linear clue.
    """
    gap = rng.uniform(80, 140) * rng.choice([-1, 1], p=[0.2, 0.8])
    middle = rng.uniform(110, 145)
    hue_2x3 = rng.uniform(-60, 60, (2, 3))
    # the weights add up to 1, so this leaves hue without luminance
    hue_2x3 -= hue_2x3 @ LUMA_3[:, None]
    back_3, front_3 = (hue_2x3 + np.array([[middle - gap / 2], [middle + gap / 2]])).astype(np.float32)
    return back_3, front_3


def _shading(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a slow wave of light across the image, at most 22 grey levels either way (height x width x 1)."""
    along_x, along_y = rng.uniform(-2.5, 2.5, 2)
    wave = np.sin(along_x * x + along_y * y + rng.uniform(0, 6.28)) * rng.uniform(5, 22)
    return wave.astype(np.float32)[:, :, None]


def _stroke(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the signed distance to a short thick line: clutter that belongs to no class."""
    centre_x, centre_y = rng.uniform(-1.2, 1.2, 2)
    angle, half_length, half_width = rng.uniform(0, 3.15), rng.uniform(0.0, 0.25), rng.uniform(0.03, 0.07)
    u, v = _turn(x - centre_x, y - centre_y, angle)
    return np.hypot(np.maximum(np.abs(u) - half_length, 0), v) - half_width


def _object_frame(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, float]:
    """Return coordinates in which the object is upright with radius 1, and its radius in half sides of the image."""
    scale, stretch = rng.uniform(0.6, 0.85), rng.uniform(1, 1.15)
    # a larger object is nearer to the middle, so that it stays within the image
    centre_x, centre_y = rng.uniform(-1, 1, 2) * (1 - scale) * 0.8
    u, v = _turn(x - centre_x, y - centre_y, rng.uniform(0, 6.28))
    return u / scale * stretch, v / scale, scale


def _turn(x: np.ndarray, y: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = float(np.cos(angle)), float(np.sin(angle))
    return x * cos + y * sin, y * cos - x * sin


def _paint_(image_HW3: np.ndarray, distance_pixels: np.ndarray, colour: np.ndarray) -> None:
    """Blend colour in where the distance is negative, with an edge one pixel wide."""
    cover = (0.5 - distance_pixels).clip(0, 1).astype(np.float32)[:, :, None]
    image_HW3 += cover * (colour - image_HW3)


def write_dataset(
    root: Path,
    *,
    seed: int = 0,
    train_per_class: int = 500,
    val_per_class: int = 100,
    side_pixels: tuple[int, int] = (72, 112),
    num_workers: int = 1,
    on_progress: Advance = show_nothing,
) -> bool:
    """Write root/{train,val}/<class>/*.JPEG, all or nothing; return False if root already holds this data set.

    num_workers processes share the work (1: none are started); any number gives the same bytes. on_progress gets
    (images done, images in all). With equal versions of numpy and Pillow the bytes are equal too.
    Raises: ConfigError for an impossible seed or number; DataError if root is of something else, or not writable.
    """
    if seed < 0:
        raise ConfigError(f"seed={seed} is not possible; give 0 or more")
    recipe = ShapesRecipe(seed, train_per_class, val_per_class, side_pixels)
    for split, number in recipe.counts.items():
        if not 1 <= number <= MAX_PER_CLASS:
            raise ConfigError(f"{split}_per_class={number} is not possible; give 1 to {MAX_PER_CLASS}")
    root = root.absolute()
    # a whole folder, which files.replacing cannot set aside
    unfinished = root.with_name(f".{root.name}.{uuid.uuid4().hex}{UNFINISHED}")
    try:
        with removing_leftovers(root):
            if _is_complete(root, recipe):
                return False
            _write_all(unfinished, recipe=recipe, num_workers=num_workers, on_progress=on_progress)
            os.replace(unfinished, root)  # also replaces an empty folder
    except OSError as error:
        if _is_complete(root, recipe):  # another process was faster
            return False
        raise DataError(f"{root}: cannot write the generated data set: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


@contextmanager
def removing_leftovers(root: Path) -> Iterator[None]:
    """After the block, remove unfinished folders that killed runs left beside root, unless another run writes there.

    Runs share a lock of root's parent folder; if its file system cannot lock, nothing is removed.
    Raises: OSError if that folder cannot be made.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(root.parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            share_lock(folder)
        yield
    finally:
        with suppress(OSError):
            if try_lock(folder):
                for left in root.parent.glob(f".{escape(root.name)}.*{UNFINISHED}"):
                    shutil.rmtree(left, ignore_errors=True)
        os.close(folder)


def _manifest(recipe: ShapesRecipe) -> dict[str, object]:
    fixed = {"name": "bigbatch generated shapes", "version": DATASET_VERSION, "jpeg_quality": JPEG_QUALITY}
    return {**fixed, **asdict(recipe), "side_pixels": list(recipe.side_pixels), "classes": list(CLASSES)}


def _is_complete(root: Path, recipe: ShapesRecipe) -> bool:
    """Return whether root holds this data set; False if it holds nothing. Raises: DataError for anything else."""
    try:
        found = parse_json(read_plain(root / MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        if (root.is_dir() and not any(root.iterdir())) or not root.exists():
            return False
        raise DataError(f"{root}: holds something else than a generated data set; name a new folder") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{root / MANIFEST}: cannot be read ({error}); {_REMEDY}") from error
    if found != _manifest(recipe):
        raise DataError(f"{root / MANIFEST}: states another data set than {recipe}; {_REMEDY}")
    for split, per_class in recipe.counts.items():
        expected, num_found = per_class * len(CLASSES), sum(1 for _ in (root / split).glob("*/[!.]*.JPEG"))
        if num_found != expected:
            raise DataError(f"{root / split}: holds {num_found} of {expected} images; {_REMEDY}")
    return True


def _write_all(folder: Path, *, recipe: ShapesRecipe, num_workers: int, on_progress: Advance) -> None:
    chunks = [
        (split, label, range(first, min(first + CHUNK_IMAGES, per_class)))
        for split, per_class in recipe.counts.items()
        for label in range(len(CLASSES))
        for first in range(0, per_class, CHUNK_IMAGES)
    ]
    # refuses an impossible num_workers before anything is written
    written = in_parallel(partial(_write_chunk, folder, recipe), chunks, num_workers=num_workers)
    for split in SPLITS:
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
    num_done, total = 0, sum(recipe.counts.values()) * len(CLASSES)
    for num_written in written:
        num_done += num_written
        on_progress(num_done, total)
    write_new(folder / MANIFEST, (as_json(_manifest(recipe), indent=2) + "\n").encode())


def _write_chunk(folder: Path, recipe: ShapesRecipe, chunk: tuple[str, int, range]) -> int:
    """Write the images of a chunk (split, label, numbers), a task of a worker process; return their number."""
    split, label, numbers = chunk
    for number in numbers:
        name, sides = CLASSES[label], recipe.side_pixels
        image = render(seed=recipe.seed, split=split, label=label, number=number, side_pixels=sides)
        path = folder / split / name / f"{name}_{number:05d}.JPEG"
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=JPEG_QUALITY)
        write_new(path, buffer.getvalue())
    return len(numbers)
