"""Read WebDataset's tar shards as published: after indexing them once, any image is one read away, as in packed shards.

The index is stored beside the shards, or in the user's cache folder if it cannot be written there.
"""

import hashlib
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bigbatch.errors import DataError, StorageError, print_line, shortened
from bigbatch.files import LIST_BYTES, read_plain, write_whole
from bigbatch.locks import wait_lock
from bigbatch.trainer.input.base import SPLITS, ImageSource
from bigbatch.trainer.input.data_root import FolderRoot, is_packed
from bigbatch.trainer.input.image_files import list_split, require_one_spelling
from bigbatch.trainer.input.order import require_same_classes
from bigbatch.trainer.input.shard_files import (
    TAR_BLOCK_BYTES,
    WEBDATASET_INDEX,
    ShardFiles,
    ShardReader,
    Stamp,
    shard_replaced,
    stamp_of,
)
from bigbatch.trainer.input.tar_headers import refuse_compressed
from bigbatch.trainer.input.webdataset_index import Index, make_index, parse_index
from bigbatch.user_settings import measured_folder

if TYPE_CHECKING:
    from bigbatch.trainer.input.storage import Storage

CLASS_NAMES = "classnames.txt"
"""File beside the shards: one line per class, for shards that number their classes."""
REMOTE_ADVICE = (
    f"if files cannot be listed, as over https, put the {WEBDATASET_INDEX} of a local copy beside the shards"
)
REINDEX = "run the same command, which indexes the shards again"


def find_shards(root: Path) -> dict[str, list[Path]]:
    """Return the shards of each split in order: root/train/*.tar, or root/*train*.tar; empty if there are none.

    A split's folder that contains class folders has no shards. Raises: DataError.
    """
    found = {split: _tars(root / split) for split in SPLITS}
    if not any(found.values()) and not any((root / split).is_dir() for split in SPLITS):
        tars = _tars(root)
        if both := [path for path in tars if all(split in path.name for split in SPLITS)]:
            raise DataError(
                f"{both[0]}: is named train and val; give the shards of each split a folder, train/ and val/"
            )
        found = {split: [path for path in tars if split in path.name] for split in SPLITS}
    return {split: paths for split, paths in found.items() if paths}


def _tars(folder: Path) -> list[Path]:
    if not folder.is_dir() or is_packed(folder):
        return []
    top = list_split(folder)
    for name in filter(_is_tar, top.bad_links):
        _stamp(folder / name)  # a whole shard may be missing
    tars = list(filter(_is_tar, top.others))
    if not top.folders and not top.loose:
        refuse_compressed(folder, top.others)
    return [] if top.folders and folder.name in SPLITS else [folder / name for name in tars]


def _is_tar(name: str) -> bool:
    return name.endswith(".tar")


def read_webdataset(root: Path, shards: Mapping[str, Sequence[Path]]) -> Index:
    """Read the index of these shards; if it is missing, one process of this host makes it. Raises: DataError."""
    stamped = {
        split: [(os.path.relpath(path, root), _stamp(path)) for path in paths] for split, paths in shards.items()
    }
    index = _indexed(root, stamped, places=[root / WEBDATASET_INDEX, *_cache_place(root)])
    return _with_names(index, lambda: read_plain(root / CLASS_NAMES), f"{root / CLASS_NAMES}")


def read_remote_webdataset(storage: "Storage") -> Index:
    """Read the index of shards in an object store, or make it by reading them. Raises: DataError; StorageError."""

    def names() -> bytes:
        try:
            return storage.fetch(CLASS_NAMES)
        except PermissionError as error:  # see Storage.holds
            raise FileNotFoundError from error

    try:
        return _with_names(_remote_index(storage), names, f"{storage.url}/{CLASS_NAMES}")
    except OSError as error:
        raise StorageError(f"{storage.url}: cannot be read ({error.strerror})") from error


def _remote_index(storage: "Storage") -> Index:
    try:
        with suppress(FileNotFoundError):
            return parse_index(storage.fetch(WEBDATASET_INDEX))
        shards: dict[str, list[tuple[str, Stamp]]] = {}
        for below in (*SPLITS, ""):
            with suppress(FileNotFoundError):
                for name, size, version in storage.shards(below):
                    if size is None:
                        raise DataError(f"{storage.url}/{name}: the server states no size; {REMOTE_ADVICE}")
                    if split := below or next((each for each in SPLITS if each in name), ""):
                        shards.setdefault(split, []).append((name, (int(size), version)))
        if not shards:
            raise DataError(f"{storage.url}: holds neither packed shards nor *train*.tar; {REMOTE_ADVICE}")
        shards = {split: shards[split] for split in SPLITS if split in shards}
        return _indexed(storage.url, shards, places=_cache_place(storage.url), storage=storage)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{storage.url}/{WEBDATASET_INDEX}: is damaged ({shortened(error)}); remove it, or put it there again"
        ) from error


def _stamp(path: Path) -> Stamp:
    try:
        return stamp_of(path.stat())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); fix the link, or remove it") from error


def _cache_place(root: Path | str) -> list[Path]:
    folder, path = measured_folder("webdataset"), root.resolve() if isinstance(root, Path) else root
    name = f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.index"
    return [] if folder is None else [folder / name]


def _indexed(
    root: Path | str,
    stamped: Mapping[str, Sequence[tuple[str, Stamp]]],
    *,
    places: Sequence[Path],
    storage: "Storage | None" = None,
) -> Index:
    """Return the index that is stored in one of places; if it is missing, one process of this host makes it."""
    if index := _stored(places, stamped):
        return index
    with _only_process(places[:1]):
        return _stored(places, stamped) or _store(make_index(root, stamped, storage=storage), root, places)


@contextmanager
def _only_process(places: Sequence[Path]) -> Iterator[None]:
    """Lock the folders of places against other processes of this host; without effect if they cannot be locked."""
    waiting = "waiting for another process, which indexes shards"
    with ExitStack() as stack:
        for place in places:
            with suppress(OSError):
                place.parent.mkdir(parents=True, exist_ok=True)
                stack.callback(os.close, folder := os.open(place.parent, os.O_RDONLY))
                wait_lock(folder, on_wait=lambda: print_line(waiting, file=sys.stderr))
        yield


def _stored(places: Sequence[Path], stamped: Mapping[str, Sequence[tuple[str, Stamp]]]) -> Index | None:
    """Return the stored index of exactly these shards; None if there is none."""
    for place in places:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            index = parse_index(read_plain(place, most=LIST_BYTES))
            if {split: list(each) for split, each in index.shards.items()} == dict(stamped):
                return index
    return None


def _store(index: Index, root: Path | str, places: Sequence[Path]) -> Index:
    """Write the index to the first writable place; return it."""
    for place in places:
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, index.to_bytes())
            print_line(f"{len(index.entries_N):,} images indexed; the index is stored in {place}", file=sys.stderr)
            return index
    print_line(f"the index of {root} cannot be stored: each start makes it again", file=sys.stderr)
    return index


def _with_names(index: Index, read: Callable[[], bytes], path: str) -> Index:
    """Return the index, with numbered classes named by the file that read returns, if any. Raises: DataError."""
    if not index.are_numbers:
        return index
    try:
        names = tuple(read().decode("utf-8-sig").splitlines())
    except FileNotFoundError:
        return index
    except (OSError, UnicodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); write one name per line in UTF-8") from error
    if len(names) < len(index.classes):
        raise DataError(f"{path}: has {len(names)} lines for {len(index.classes)} classes; write one name per class")
    if not all(map(str.strip, names)):
        raise DataError(f"{path}: has an empty line; write one name per class")
    require_one_spelling(Path(path), names)
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise DataError(f"{path}: names {times} classes {name!r}; give each another name")
    return replace(index, classes=names)


class WebDatasetRoot:
    """Root with local shards; finds and indexes them once, for all splits and calls."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def shards(self) -> dict[str, list[Path]]:
        """Return the shards of each split; empty if there are none. Raises: DataError."""
        return find_shards(self.path)

    @cached_property
    def _index(self) -> Index:
        return read_webdataset(self.path, self.shards)

    def open(self, split: str, *, classes: Sequence[str] | None = None) -> "WebDatasetSplit":
        self._index.require(split, where=self.path)
        found = WebDatasetSplit(self.path, split, self._index, reopen=partial(_open_again, self.path, split))
        if classes is not None:
            require_same_classes(self.path, found=found.classes, expected=classes)
        return found

    def classes(self, split: str) -> tuple[str, ...] | None:
        return self._index.classes if split in self.shards else FolderRoot(self.path).classes(split)


def _open_again(path: Path, split: str) -> "WebDatasetSplit":
    return WebDatasetRoot(path).open(split)


class WebDatasetSplit:
    """ImageSource of one split of WebDataset's shards."""

    def __init__(
        self,
        root: Path | str,
        split: str,
        index: Index,
        *,
        reopen: Callable[[], ImageSource],
        files: ShardReader | None = None,
    ) -> None:
        """Open no shard yet. reopen: opens the split in another process; files: reader of shards that are not local."""
        self._root, self._reopen = root, reopen
        self.classes = index.classes
        before = 0 if split == next(iter(index.shards)) else len(index.shards[next(iter(index.shards))])
        self.shards = index.shards[split]
        shards_N = index.entries_N["shard"]
        own = slice(*np.searchsorted(shards_N, [before, before + len(self.shards)]).tolist())
        self.entries_N = index.entries_N[own]
        if not len(self.entries_N):
            raise DataError(f"{root}: the shards for {split} hold no image with its class; name other ones")
        self._first_shard, self._names = before, index.names
        self._first_name = int(index.entries_N["name_end"][own.start - 1]) if own.start else 0
        self.labels_N = self.entries_N["label"].astype(np.int64)
        self.left_out_samples = index.left_out.get(split, {})
        self.left_out = {kind: len(samples) for kind, samples in self.left_out_samples.items()}
        paths = [f"{root}/{name}" for name, _ in self.shards]
        self._files = files or ShardFiles(paths, stamps=[stamp for _, stamp in self.shards])

    def __len__(self) -> int:
        return len(self.entries_N)

    def name(self, position: int) -> str:
        """Return the shard's path and the name of the member."""
        start = self.entries_N[position - 1]["name_end"] if position else self._first_name
        member = os.fsdecode(self._names[start : self.entries_N[position]["name_end"]])
        shard, _ = self.shards[self.entries_N[position]["shard"] - self._first_shard]
        return f"{self._root}/{shard}: {member}"

    def sizes(self, positions_B: np.ndarray) -> None:
        return None

    def read(self, position: int) -> bytes:
        """Read an image. Raises: StorageError if the shard is gone, cut or has changed."""
        shard, offset, length, _, header, _ = self.entries_N[position].item()
        data = self._files.read(
            shard - self._first_shard,
            TAR_BLOCK_BYTES + length,
            offset - TAR_BLOCK_BYTES,
            name=lambda: self.name(position),
            again=REINDEX,
        )
        if zlib.crc32(data[:TAR_BLOCK_BYTES]) != header:
            raise shard_replaced(self.name(position))
        return data[TAR_BLOCK_BYTES:]

    def close(self) -> None:
        self._files.close()

    def __reduce__(self) -> tuple[Callable[[], ImageSource], tuple[()]]:
        """Pickle only what to open; the receiving process reads the index again."""
        return self._reopen, ()
