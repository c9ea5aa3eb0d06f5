"""List all files in the folders of a split; faults do not stop the listing."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bigbatch.trainer.input.base import ImageSource
from bigbatch.trainer.input.image_files import list_below, list_split
from bigbatch.trainer.input.listed import read_images
from bigbatch.trainer.input.order import ImageIndex
from bigbatch.trainer.input.shards import ENTRIES, FACTS, SETTINGS, is_packed, read_packed


@dataclass(frozen=True)
class Listing:
    """Lists a split before any image is read."""

    images: ImageSource
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Kind -> paths of files that look like images but are not read."""
    nested: tuple[str, ...] = ()
    """Folders below those of classes that hold images."""
    strays: tuple[str, ...] = ()
    """Paths of all other files, also hidden ones."""
    unlisted: tuple[str, ...] = ()
    """One line for each folder that cannot be listed."""


def list_folder(folder: Path) -> Listing:
    """List folder/<class>/.../<image>, by the loaders' rule, and all else. Raises: DataError if it cannot be listed."""
    top = list_split(folder)
    below = [list_below(folder / name) for name in top.folders]
    found = ImageIndex(
        root=str(folder),
        classes=tuple(top.folders),
        paths=[f"{name}/{image}" for name, each in zip(top.folders, below, strict=True) for image in each.images],
        labels_N=np.repeat(np.arange(len(below), dtype=np.int64), [len(each.images) for each in below]),
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
    """List the images of root/split, packed, in folders, or as the list root has them.

    Raises: DataError if there is no way to list them.
    """
    if root.is_file():
        return Listing(read_images(root, split))
    folder = root / split
    return list_packed(folder) if is_packed(folder) else list_folder(folder)
