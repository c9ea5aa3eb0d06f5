"""What lies in the folders of a split, good or not: nothing here stops at a fault."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bigbatch.trainer.data.imagenet import PICTURE_SUFFIXES
from bigbatch.trainer.data.loader import Pictures
from bigbatch.trainer.data.shards import ENTRIES, FACTS, SETTINGS, is_packed, read_entries, read_packed
from bigbatch.trainer.errors import DataError


@dataclass(frozen=True)
class FolderPictures:
    """split/<class>/<picture> on disk. All file names lie in one bytes object, so that a million travel fast."""

    folder: str
    classes: tuple[str, ...]
    labels_N: np.ndarray
    names: bytes
    ends_N: np.ndarray
    """Where each name ends in names."""

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self.labels_N)

    def name(self, position: int) -> str:
        """The path of a picture."""
        start = self.ends_N[position - 1] if position else 0
        file_name = os.fsdecode(self.names[start : self.ends_N[position]])
        return f"{self.folder}/{self.classes[self.labels_N[position]]}/{file_name}"

    def read(self, position: int) -> bytes:
        """Its bytes. Raises: OSError."""
        return Path(self.name(position)).read_bytes()


@dataclass(frozen=True)
class Listing:
    """A split before any picture is read."""

    pictures: Pictures
    strays: tuple[str, ...] = ()
    """Paths of what is neither a class folder nor a picture in one."""
    unlisted: tuple[str, ...] = ()
    """One line for each class folder that cannot be listed."""


@dataclass
class _Found:
    """What a walk through class folders gathers."""

    names: list[bytes] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)

    def visit(self, folder: str) -> None:
        """Take the pictures of a class folder, by the same rule as the loaders."""
        pictures: list[bytes] = []
        try:
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.lower().endswith(PICTURE_SUFFIXES):
                        pictures.append(os.fsencode(entry.name))
                    else:
                        self.strays.append(entry.path)
        except OSError as error:
            self.unlisted.append(_unlisted(folder, error))
        self.names += pictures
        self.counts.append(len(pictures))


def _unlisted(folder: str, error: OSError) -> str:
    return f"{folder}: cannot be listed ({error.strerror}); check its permissions"


def list_folder(folder: Path) -> Listing:
    """List folder/<class>/<picture> and all else that lies there. Raises: DataError if folder is unreadable."""
    try:
        with os.scandir(folder) as entries:
            is_class = {entry.path: entry.is_dir() and not entry.name.startswith(".") for entry in entries}
    except OSError as error:
        raise DataError(_unlisted(str(folder), error)) from error
    paths = sorted(path for path in is_class if is_class[path])
    found = _Found(strays=sorted(path for path in is_class if not is_class[path]))
    for path in paths:
        found.visit(path)
    pictures = FolderPictures(
        folder=str(folder),
        classes=tuple(os.path.basename(path) for path in paths),
        labels_N=np.repeat(np.arange(len(paths), dtype=np.int64), found.counts),
        names=b"".join(found.names),
        ends_N=np.cumsum([len(name) for name in found.names], dtype=np.int64),
    )
    return Listing(pictures, strays=tuple(found.strays), unlisted=tuple(found.unlisted))


def list_packed(folder: Path) -> Listing:
    """Open a packed split and list all else that lies there. Raises: DataError."""
    pictures = read_packed(folder)
    facts, _ = read_entries(folder)
    expected = {FACTS, ENTRIES, SETTINGS, *(shard.name for shard in facts.shards)}
    strays = sorted(str(path) for path in folder.iterdir() if path.name not in expected)
    return Listing(pictures, strays=tuple(strays))


def open_listing(root: Path, split: str) -> Listing:
    """The pictures of root/split, packed or in folders. Raises: DataError if there is no way to list them."""
    folder = root / split
    return list_packed(folder) if is_packed(folder) else list_folder(folder)
