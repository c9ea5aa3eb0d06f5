"""The root of a data set: tells its form, and lists the images of a split. Each form but class folders is a part."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from bigbatch.errors import ConfigError
from bigbatch.parts import load
from bigbatch.trainer.config.dotted import class_of_root, names_list
from bigbatch.trainer.input.base import SPLITS, ImageSource
from bigbatch.trainer.input.image_files import list_split
from bigbatch.trainer.input.order import read_index

FORMS = {
    "packed": "bigbatch.trainer.input.shards.PackedRoot",
    "list": "bigbatch.trainer.input.listed.ListRoot",
    "webdataset": "bigbatch.trainer.input.webdataset.WebDatasetRoot",
    "address": "bigbatch.trainer.input.remote.RemoteRoot",
    "class": "bigbatch.trainer.input.own_images.ClassRoot",
}
"""Form of a data set -> import path of its Root, which is loaded if a root has this form."""
SCHEMES = ("s3", "gs", "https", "http")
CREDENTIALS = (
    "give credentials and region as to the library: in the environment (AWS_ACCESS_KEY_ID, "
    "GOOGLE_APPLICATION_CREDENTIALS ...) or its files"
)
INDEX, SETTINGS, STAGED = "index.json", "pack.json", ".staged"
"""Files of a packed split: its index, the settings of the packer, and the mark of a split that stage() wrote."""
_TAR = re.compile(r"\.(tar|tgz|tbz|txz|tzst)", re.IGNORECASE)


class Root(Protocol):
    """Images of all splits of one data set."""

    def open(self, split: str, *, classes: Sequence[str] | None = None) -> ImageSource:
        """List the images of a split. classes: those that it must have. Raises: DataError; StorageError."""

    def classes(self, split: str) -> tuple[str, ...] | None:
        """Return a split's sorted class names without listing images; None if there is no split. Raises: DataError."""


@dataclass(frozen=True)
class Cache:
    """Folder and size of this host's cache of data read from storage, and users who share it; None: this one alone."""

    folder: Path
    num_bytes: int
    shared_by: Sequence[str] | None = None


def url_of(root: Path | str) -> str | None:
    """Return the address of a root in an object store or on a web server; None for a path. Raises: ConfigError."""
    scheme, colon, rest = str(root).partition(":")
    if scheme not in SCHEMES or not colon or not rest.startswith("/"):
        return None
    rest = rest.strip("/")  # Path makes one slash of two
    if "@" in rest.partition("/")[0] or "?" in rest or "#" in rest:
        # a password would be printed, and stored in the run folder
        raise ConfigError(
            f"data.root={scheme}://...: an address must hold no user, password, query or fragment; {CREDENTIALS}"
        )
    return f"{scheme}://{rest}"


def is_packed(folder: Path) -> bool:
    """Return whether a split holds shards of `bigbatch data pack`, perhaps unfinished."""
    return any((folder / name).exists() for name in (INDEX, SETTINGS, STAGED))


class DataRoot:
    """Folder, list, address or class of a data set: a Root of any form, which finds its shards once for all calls."""

    def __init__(
        self, root: Path | str, *, cache: Cache | None = None, retries: bool = False, listed: str | None = None
    ) -> None:
        """Read nothing yet. cache: local copy of data read from an object store; retries: see RemoteShards.

        listed: a list of the images below root. Raises: ConfigError.
        """
        self.path, url = Path(root), url_of(root)
        self.name = url or str(self.path)
        self._other: Root | None = None
        """Root that is not a path here."""
        if listed and (url or class_of_root(str(root))):
            raise ConfigError(
                f"data.list={listed} lists images in a folder, but data.root={root} is none: set it to null"
            )
        if listed:
            self._other = load(FORMS["list"])(Path(listed), folder=str(root))
        elif url:
            self._other = load(FORMS["address"])(url, cache=cache, retries=retries)
        elif class_of_root(str(root)):
            self._other = load(FORMS["class"])(str(root))

    @cached_property
    def shards(self) -> Mapping[str, Sequence[Path]]:
        """Return the local WebDataset shards of each split; empty if there are none. Raises: DataError."""
        return self._webdataset.shards if self._other is None and _may_hold_tars(self.path) else {}

    def open(self, split: str, *, classes: Sequence[str] | None = None) -> ImageSource:
        """Open a split in any form: packed, WebDataset's shards, a list, class folders. classes: those it must have.

        Raises: DataError naming shard and member, or the file that is missing, cut or damaged; StorageError.
        """
        return self._root_of(split).open(split, classes=classes)

    def classes(self, split: str) -> tuple[str, ...] | None:
        """Return a split's sorted class names without listing images; None if there is no split. Raises: DataError."""
        return self._root_of(split).classes(split)

    def _root_of(self, split: str) -> Root:
        if self._other is not None:
            return self._other
        is_list = self.path.is_file() or (names_list(self.name) and not self.path.exists())
        form = "packed" if is_packed(self.path / split) else "list" if is_list else ""
        if not form and self.shards:
            return self._webdataset
        return load(FORMS[form])(self.path) if form else FolderRoot(self.path)

    @cached_property
    def _webdataset(self):  # type: ignore[no-untyped-def]
        return load(FORMS["webdataset"])(self.path)


class FolderRoot:
    """Root with class folders: root/split/<class>/<image>."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, split: str, *, classes: Sequence[str] | None = None) -> ImageSource:
        return read_index(self.path, split, classes=classes)

    def classes(self, split: str) -> tuple[str, ...] | None:
        folder = self.path / split
        return tuple(list_split(folder).folders) if folder.is_dir() else None


def _may_hold_tars(root: Path) -> bool:
    """Return whether a file in the folder, or in that of a split, is named as a tar; True if one cannot be listed."""
    for folder in (root, *(root / split for split in SPLITS)):
        try:
            if any(map(_TAR.search, os.listdir(folder))):
                return True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return True
    return False


def open_split(
    root: Path | str, split: str, *, classes: Sequence[str] | None = None, cache: Cache | None = None
) -> ImageSource:
    """Open one split, as DataRoot.open does."""
    return DataRoot(root, cache=cache).open(split, classes=classes)
