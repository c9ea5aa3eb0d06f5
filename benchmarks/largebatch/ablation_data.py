"""Pictures of the ablations: some of each class of a data set in class folders, and small where the form says so."""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from bigbatch.errors import DataError

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Images:
    """Says which pictures of a data set there are, and in what size."""

    train_per_class: int
    """At most; the first ones by name."""
    val_per_class: int
    resize_to: int | None
    """Side in pixels, squeezed by a box of the whole picture into a lossless file; None to leave them as they are."""


def missing_split(source: Path) -> Path | None:
    """Name a folder of class folders that is not there."""
    return next((source / split for split in SPLITS if not (source / split).is_dir()), None)


def write_images(images: Images, source: Path, root: Path) -> None:
    """Write ROOT/{train,val}/<class>/<picture> out of the same below source, unless an earlier call finished it.

    Raises: DataError where source has no such folders.
    """
    done = root / "complete"
    if done.exists():
        return
    if missing := missing_split(source):
        raise DataError(f"{missing} is not there: name the data set's folder by --data")
    for split, most in zip(SPLITS, (images.train_per_class, images.val_per_class), strict=True):
        for folder in sorted((source / split).iterdir()):
            for path in sorted(folder.iterdir())[:most]:
                write_one(path, root / split / folder.name / path.name, size=images.resize_to)
    done.touch()


def write_one(source: Path, path: Path, *, size: int | None) -> None:
    """Write it as it is, or as a PNG of size x size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if size is None:
        path.write_bytes(source.read_bytes())
        return
    with Image.open(source) as image:
        small = image.convert("RGB").resize((size, size), Image.Resampling.BOX)
    small.save(path.with_suffix(".png"))
