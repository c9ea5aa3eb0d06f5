"""What lies in the folders of a split, good or not: nothing here stops at a fault."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bigbatch.files import read_plain
from bigbatch.trainer.input.base import Images
from bigbatch.trainer.input.image_files import list_below, list_split
from bigbatch.trainer.input.listed import read_images
from bigbatch.trainer.input.shards import ENTRIES, FACTS, SETTINGS, is_packed, read_packed


@dataclass(frozen=True)
class FolderImages:
    """Lists split/<class>/.../<image> on disk. All file names lie in one bytes object, so a million travel fast."""

    folder: str
    classes: tuple[str, ...]
    labels_N: np.ndarray
    names: bytes
    ends_N: np.ndarray
    """Where each name ends in names; one of a folder below its class has that folder before it."""

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
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Paths of what looks like images and is not read, by kind."""
    nested: tuple[str, ...] = ()
    """Folders below those of classes that hold images."""
    strays: tuple[str, ...] = ()
    """Paths of all else, hidden files among them."""
    unlisted: tuple[str, ...] = ()
    """One line for each folder that cannot be listed."""


def list_folder(folder: Path) -> Listing:
    """List folder/<class>/.../<image>, by the loaders' rule, and all else. Raises: DataError if it cannot be listed."""
    top = list_split(folder)
    below = [list_below(folder / name) for name in top.folders]
    names = [os.fsencode(name) for each in below for name in each.images]
    found = FolderImages(
        folder=str(folder),
        classes=tuple(top.folders),
        labels_N=np.repeat(np.arange(len(below), dtype=np.int64), [len(each.images) for each in below]),
        names=b"".join(names),
        ends_N=np.cumsum([len(name) for name in names], dtype=np.int64),
    )
    places = {str(folder): top, **{f"{folder}/{name}": each for name, each in zip(top.folders, below, strict=True)}}
    left_out: dict[str, list[str]] = defaultdict(list)
    for place, contents in places.items():
        for kind, paths in contents.left_out().items():
            left_out[kind] += [f"{place}/{path}" for path in paths]
    nested = {os.path.dirname(f"{place}/{path}") for place, each in places.items() for path in each.images}
    return Listing(
        found,
        left_out=left_out,
        nested=tuple(sorted(nested - places.keys())),
        strays=tuple(f"{place}/{path}" for place, each in places.items() for path in (*each.hidden, *each.others)),
        unlisted=tuple(line for each in places.values() for line in each.unlisted),
    )


def list_packed(folder: Path) -> Listing:
    """Open a packed split and list all else that lies there. Raises: DataError."""
    index = read_packed(folder)
    expected = {FACTS, ENTRIES, SETTINGS, *(shard.name for shard in index.facts.shards)}
    found = list_below(folder)
    beside = tuple(f"{folder}/{path}" for path in (*found.images, *found.unread))
    return Listing(
        index,
        left_out={"in no shard": beside} if beside else {},
        strays=tuple(f"{folder}/{path}" for path in sorted({*found.hidden, *found.others} - expected)),
        unlisted=tuple(found.unlisted),
    )


def open_listing(root: Path, split: str) -> Listing:
    """List the pictures of root/split, packed, in folders, or as the list root has them.

    Raises: DataError if there is no way to list them.
    """
    if root.is_file():
        return Listing(read_images(root, split))
    folder = root / split
    return list_packed(folder) if is_packed(folder) else list_folder(folder)
