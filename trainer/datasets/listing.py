"""What lies in the folders of a split, good or not: nothing here stops at a fault."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigbatch.errors import DataError
from bigbatch.files import read_plain
from bigbatch.trainer.input.base import Images
from bigbatch.trainer.input.listed import read_images
from bigbatch.trainer.input.order import list_names
from bigbatch.trainer.input.shards import ENTRIES, FACTS, SETTINGS, is_packed, read_packed


@dataclass(frozen=True)
class FolderImages:
    """Lists split/<class>/<picture> on disk. All file names lie in one bytes object, so that a million travel fast."""

    folder: str
    classes: tuple[str, ...]
    labels_N: np.ndarray
    names: bytes
    ends_N: np.ndarray
    """Where each name ends in names."""

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.labels_N)

    def name(self, position: int) -> str:
        """Return the path of a picture."""
        start = self.ends_N[position - 1] if position else 0
        file_name = os.fsdecode(self.names[start : self.ends_N[position]])
        return f"{self.folder}/{self.classes[self.labels_N[position]]}/{file_name}"

    def read(self, position: int) -> bytes:
        """Return its bytes. Raises: OSError."""
        return read_plain(self.name(position))


@dataclass(frozen=True)
class Listing:
    """Lists a split before any picture is read."""

    images: Images
    strays: tuple[str, ...] = ()
    """Paths of what is neither a class folder nor a picture in one."""
    unlisted: tuple[str, ...] = ()
    """One line for each class folder that cannot be listed."""


def list_folder(folder: Path) -> Listing:
    """List folder/<class>/<picture>, by the loaders' rule, and all else. Raises: DataError if it cannot be listed."""
    classes, others = list_names(folder, want_folders=True)
    strays = [f"{folder}/{name}" for name in others]
    unlisted, names, counts = [], [], []
    for class_name in classes:
        try:
            images, others = list_names(folder / class_name, want_folders=False)
        except DataError as error:
            unlisted.append(str(error))
            images, others = [], []
        names += [os.fsencode(name) for name in images]
        counts.append(len(images))
        strays += [f"{folder}/{class_name}/{name}" for name in others]
    found = FolderImages(
        folder=str(folder),
        classes=tuple(classes),
        labels_N=np.repeat(np.arange(len(classes), dtype=np.int64), counts),
        names=b"".join(names),
        ends_N=np.cumsum([len(name) for name in names], dtype=np.int64),
    )
    return Listing(found, strays=tuple(strays), unlisted=tuple(unlisted))


def list_packed(folder: Path) -> Listing:
    """Open a packed split and list all else that lies there. Raises: DataError."""
    index = read_packed(folder)
    expected = {FACTS, ENTRIES, SETTINGS, *(shard.name for shard in index.facts.shards)}
    strays = sorted(str(path) for path in folder.iterdir() if path.name not in expected)
    return Listing(index, strays=tuple(strays))


def open_listing(root: Path, split: str) -> Listing:
    """List the pictures of root/split, packed, in folders, or as the list root has them.

    Raises: DataError if there is no way to list them.
    """
    if root.is_file():
        return Listing(read_images(root, split))
    folder = root / split
    return list_packed(folder) if is_packed(folder) else list_folder(folder)
