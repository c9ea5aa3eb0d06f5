"""WebDataset's tar shards as they are published: indexed once, then any image is one read away, as in packed shards.

Members that follow each other with equal names up to the first dot are one sample: an image, and its class in .cls or
.json. The index is a file: a line of JSON (see _head), one ENTRY per image, and the names of the members. It lies
beside the shards, or in the user's cache if nothing can be written there.
"""

import hashlib
import json
import os
import re
import stat
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bigbatch.comm.rendezvous.environ import measured_folder
from bigbatch.errors import DataError, StorageError, print_line, shortened
from bigbatch.files import parse_json, write_whole
from bigbatch.locks import try_lock, wait_lock
from bigbatch.trainer.input.formats import MAX_PIXELS
from bigbatch.trainer.input.image_files import (
    IMAGE_SUFFIXES,
    UNREAD_SUFFIXES,
    is_hidden,
    list_split,
    require_one_spelling,
)
from bigbatch.trainer.input.listed import SPLITS
from bigbatch.trainer.input.order import require_same_classes
from bigbatch.trainer.input.shard_files import ShardFiles, ShardReader, Stamp, is_packed, replaced, stamp_of
from bigbatch.trainer.input.storage import Storage
from bigbatch.trainer.input.tar_headers import BLOCK_BYTES, Member, Window, read_members

VERSION = 1
INDEX, NAMES = "webdataset.index", "classnames.txt"
"""Files beside the shards: the index, and one line per class for shards that number their classes."""
ENTRY = np.dtype(
    [("shard", "<i4"), ("offset", "<i8"), ("length", "<i4"), ("label", "<i4"), ("header", "<u4"), ("name_end", "<i8")]
)
"""Shard in the list of both splits; offset and length in bytes; CRC-32 of the member's header; end of its name."""
LABEL, JSON_LABEL = "cls", "json"
JSON_KEYS = ("label", "cls", "class")
MAX_MEMBER_BYTES = 4 * MAX_PIXELS
MAX_LABEL_BYTES, MAX_CLASSES, MAX_LEFT_OUT = 1 << 16, 100_000, 10_000
NUM_THREADS = 16
"""Shards that are indexed at the same time: on a network file system each read waits."""
AGAIN = "run the same command, which indexes the shards again"


@dataclass
class ShardContents:
    """Images of one shard, in order."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, length and CRC-32 of the header of each."""
    names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Index:
    """Images of all splits of one folder."""

    classes: tuple[str, ...]
    are_numbers: bool
    """Whether the shards number the classes, so that their names may come from elsewhere."""
    shards: Mapping[str, Sequence[tuple[str, Stamp]]]
    """Split -> path below the folder, and stamp, of each of its shards."""
    left_out: Mapping[str, Mapping[str, Sequence[str]]]
    """Split -> kind -> samples that look like images and are not read."""
    entries_N: np.ndarray
    names: bytes

    def require(self, split: str, *, where: Path | str) -> None:
        """Raise DataError if there are no shards for a split; where: they would lie."""
        if split not in self.shards:
            raise DataError(f"{where}: holds shards for {' and '.join(self.shards)}, but none for {split}")


def find_shards(root: Path) -> dict[str, list[Path]]:
    """Return the shards of each split in order: root/train/*.tar, or root/*train*.tar; empty if there are none.

    A split's folder with folders of classes in it is none of shards. Raises: DataError.
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
    return [] if top.folders and folder.name in SPLITS else [folder / name for name in top.others if _is_tar(name)]


def _is_tar(name: str) -> bool:
    return name.endswith(".tar")


def open_webdataset(
    root: Path, split: str, *, shards: Mapping[str, Sequence[Path]], classes: Sequence[str] | None = None
) -> "WebDatasetSplit":
    """Open a split of the shards that find_shards found; index them first, once. Classes: see open_split.

    Raises: DataError naming shard and member.
    """
    index = read_webdataset(root, shards)
    if classes is not None:
        require_same_classes(root, found=index.classes, expected=classes)
    index.require(split, where=root)
    return WebDatasetSplit(root, split, index)


def read_webdataset(root: Path, shards: Mapping[str, Sequence[Path]]) -> Index:
    """Read the index of these shards, or make it, in one process of this host. Raises: DataError."""
    stamped = {
        split: [(os.path.relpath(path, root), _stamp(path)) for path in paths] for split, paths in shards.items()
    }
    places = [root / INDEX, *_own_place(root)]
    index = _kept(places, stamped)
    if index is None:
        with _only_process(root):
            index = _kept(places, stamped) or _make(root, stamped, places)
    return _named(index, (root / NAMES).read_bytes, f"{root / NAMES}")


def read_remote_webdataset(storage: Storage) -> Index:
    """Read the index beside shards in an object store, or make it by reading all of them once.

    Raises: DataError; StorageError.
    """
    try:
        return _named(_remote_index(storage), lambda: storage.fetch(NAMES), f"{storage.url}/{NAMES}")
    except OSError as error:
        raise StorageError(f"{storage.url}: cannot be read ({error.strerror})") from error


def _remote_index(storage: Storage) -> Index:
    try:
        with suppress(FileNotFoundError):
            return parse_index(storage.fetch(INDEX))
        shards: dict[str, list[tuple[str, Stamp]]] = {}
        for below in (*SPLITS, ""):
            with suppress(FileNotFoundError):
                for name, size, version in storage.shards(below):
                    if split := below or next((each for each in SPLITS if each in name), ""):
                        shards.setdefault(split, []).append((name, (size, version)))
        if not shards:
            raise DataError(f"{storage.url}: holds neither packed shards nor *train*.tar; {REMOTE}")
        shards = {split: shards[split] for split in SPLITS if split in shards}
        places = _own_place(storage.url)
        return _kept(places, shards) or _make(storage.url, shards, places, storage=storage)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{storage.url}/{INDEX}: is damaged ({shortened(error)}); remove it, or put it there anew"
        ) from error


REMOTE = f"where files cannot be listed, as by https, put the {INDEX} of a local copy beside the shards"


def _stamp(path: Path) -> Stamp:
    try:
        return stamp_of(path.stat())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); mend the link, or remove it") from error


def _own_place(root: Path | str) -> list[Path]:
    folder, path = measured_folder("webdataset"), root.resolve() if isinstance(root, Path) else root
    name = f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.index"
    return [] if folder is None else [folder / name]


@contextmanager
def _only_process(root: Path) -> Iterator[None]:
    """Lock root for this process of the host; without effect on a file system that cannot lock."""
    folder = os.open(root, os.O_RDONLY)
    try:
        with suppress(OSError):
            if not try_lock(folder):
                print_line(f"waiting for another process, which indexes the shards of {root}", file=sys.stderr)
                wait_lock(folder)
        yield
    finally:
        os.close(folder)


def _kept(places: Sequence[Path], stamped: Mapping[str, Sequence[tuple[str, Stamp]]]) -> Index | None:
    """Return the index of exactly these shards, or None."""
    for place in places:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            index = parse_index(place.read_bytes())
            if {split: list(each) for split, each in index.shards.items()} == dict(stamped):
                return index
    return None


def parse_index(data: bytes) -> Index:
    """Read what _head and _make wrote. Raises: ValueError, TypeError, KeyError or AttributeError for anything else."""
    line, _, rest = data.partition(b"\n")
    head = parse_json(line)
    if head["version"] != VERSION or head["sha256"] != hashlib.sha256(rest).hexdigest():
        raise ValueError("another version or other entries")
    entries_N = np.frombuffer(rest, ENTRY, count=int(head["num_images"]))
    shards = {
        split: [(str(name), (int(a), int(b))) for name, (a, b) in head["shards"][split]] for split in head["shards"]
    }
    left_out = {
        split: {str(kind): [str(name) for name in each[kind]] for kind in each}
        for split, each in head["left_out"].items()
    }
    classes = tuple(map(str, head["classes"]))
    if len(set(classes)) < len(classes):
        raise ValueError("a class that comes twice")
    index = Index(classes, head["are_numbers"] is True, shards, left_out, entries_N, rest[entries_N.nbytes :])
    sizes = np.array([size for split in SPLITS for _, (size, _) in shards.get(split, ())], np.int64)
    shards_N, offsets_N, lengths_N, ends_N = (entries_N[key] for key in ("shard", "offset", "length", "name_end"))
    in_order = (np.diff(shards_N) >= 0).all() and (np.diff(ends_N, prepend=0) >= 0).all()
    if (
        not len(entries_N)
        or not in_order
        or shards_N[0] < 0
        or shards_N[-1] >= len(sizes)
        or ends_N[-1] > len(index.names)
    ):
        raise ValueError("entries out of order")
    if ((offsets_N < BLOCK_BYTES) | (lengths_N < 0) | (offsets_N + lengths_N > sizes[shards_N])).any():
        raise ValueError("an entry outside of its shard")
    if ((entries_N["label"] < 0) | (entries_N["label"] >= len(index.classes))).any():
        raise ValueError("a label of no class")
    return index


def _make(
    root: Path | str,
    stamped: Mapping[str, Sequence[tuple[str, Stamp]]],
    places: Sequence[Path],
    *,
    storage: Storage | None = None,
) -> Index:
    num_shards = sum(map(len, stamped.values()))
    print_line(f"indexing {num_shards:,} WebDataset shards of {root}, once", file=sys.stderr)
    paths = [f"{root}/{name}" for split in stamped for name, _ in stamped[split]]
    sizes = [size for split in stamped for _, (size, _) in stamped[split]]
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="bigbatch-index") as threads:
        try:
            contents = list(threads.map(partial(index_shard, storage=storage), paths, sizes))
        finally:
            threads.shutdown(cancel_futures=True)
    index = _joined(stamped, paths, contents)
    head, rest = _head(index)
    for place in places:
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, head + b"\n" + rest)
            print_line(f"{len(index.entries_N):,} images indexed; the index is {place}", file=sys.stderr)
            return index
    print_line(f"the index of {root} cannot be kept there: each start makes it again", file=sys.stderr)
    return index


def _head(index: Index) -> tuple[bytes, bytes]:
    """Return the line that says what an index is of, and the bytes that follow it."""
    rest = index.entries_N.tobytes() + index.names
    head: dict[str, Any] = {
        "version": VERSION,
        "sha256": hashlib.sha256(rest).hexdigest(),
        "num_images": len(index.entries_N),
        "are_numbers": index.are_numbers,
        "classes": index.classes,
        "shards": index.shards,
        "left_out": index.left_out,
    }
    return json.dumps(head).encode(), rest


@contextmanager
def _window(path: str, num_bytes: int, storage: Storage | None) -> Iterator[Window]:
    if storage is not None:
        name = path.removeprefix(f"{storage.url}/")

        def fetch(length: int, offset: int) -> bytes:
            # a server answers a range behind the end with an error
            return storage.fetch(name, offset, min(offset + length, num_bytes)) if offset < num_bytes else b""

        # each request takes its time: all bytes are read, in few requests
        yield Window(fetch, num_bytes=1 << 23)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DataError(f"{path}: is no file; remove it")
        yield Window(lambda length, offset: os.pread(descriptor, length, offset))
    finally:
        os.close(descriptor)


def index_shard(path: str, num_bytes: int, *, storage: Storage | None = None) -> ShardContents:
    """Find the images of one shard, with their labels. Raises: DataError naming shard and member."""
    found, seen, key, sample = ShardContents(), set[str](), "", dict[str, Member]()
    try:
        with _window(path, num_bytes, storage) as window:
            for member in read_members(window, path=path, num_bytes=num_bytes):
                folder, slash, name = member.name.rpartition("/")
                stem, dot, suffix = name.partition(".")
                # what is hidden would part a sample; WebDataset passes over the others, too
                if is_hidden(name) or not dot or _is_meta(member.name):
                    continue
                if (this := folder + slash + stem) != key:
                    _finish(path, key, sample, window, found)
                    if this in seen:
                        raise DataError(f"{path}: member {shortened(member.name)}: its sample comes twice; {_GET}")
                    key, sample = this, {}
                    seen.add(key)
                if (suffix := suffix.lower()) in sample:
                    raise DataError(f"{path}: member {shortened(member.name)} comes twice; {_GET}")
                sample[suffix] = member
            _finish(path, key, sample, window, found)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}); check its permissions and disk") from error
    return found


_GET = "get another shard, or remove it"
_is_meta = re.compile(r"(^|/)__[^/]*__($|/|\.)").search


def _finish(path: str, key: str, sample: Mapping[str, Member], window: Window, found: ShardContents) -> None:
    """Add a whole sample to found. Raises: DataError."""
    images = [member for suffix, member in sample.items() if f".{suffix}" in IMAGE_SUFFIXES]
    if not images:
        if sample:
            unread = (f".{suffix}" for suffix in sample if f".{suffix}" in UNREAD_SUFFIXES)
            found.left_out[next(unread, "sample without an image")].append(f"{path}: {key}")
        return
    image = images[0]
    if len(images) > 1:
        raise DataError(f"{path}: members {' and '.join(m.name for m in images)}: two images in one sample; {_GET}")
    if image.num_bytes > MAX_MEMBER_BYTES:
        most = f"more than an image of {MAX_PIXELS / 1e6:g} megapixels takes ({MAX_MEMBER_BYTES:,})"
        raise DataError(f"{path}: member {shortened(image.name)}: claims {image.num_bytes:,} bytes, {most}; {_GET}")
    found.labels.append(_label(path, image, sample, window))
    found.rows.append((image.offset, image.num_bytes, image.header))
    found.names.append(image.name)


def _label(path: str, image: Member, sample: Mapping[str, Member], window: Window) -> str:
    """Return the text of a sample's class. Raises: DataError."""
    member = sample.get(LABEL) or sample.get(JSON_LABEL)
    if member is None:
        beside = f"no .{LABEL} and no .{JSON_LABEL} beside it"
        raise DataError(f"{path}: member {shortened(image.name)} has no class: {beside}; {_GET}")
    where = f"{path}: member {shortened(member.name)}"
    if member.num_bytes > MAX_LABEL_BYTES:
        raise DataError(f"{where}: claims {member.num_bytes:,} bytes, more than a class takes; {_GET}")
    data = window.at(member.offset, member.num_bytes)
    try:
        label: object = data.decode().strip()
        if member is not sample.get(LABEL):
            label = parse_json(data)
            if isinstance(label, dict):
                label = next((label[name] for name in JSON_KEYS if name in label), None)
    except ValueError:
        label = data
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise DataError(f"{where}: states no class, such as {{'label': 3}}, but {shortened(label)}; {_GET}")
    if not (text := str(label)).isprintable() or not 0 < len(text.encode()) < 200:
        raise DataError(f"{where}: {shortened(text)} is no name of a class; {_GET}")
    return text


def _joined(
    stamped: Mapping[str, Sequence[tuple[str, Stamp]]], paths: Sequence[str], contents: Sequence[ShardContents]
) -> Index:
    """Put the shards of all splits together; labels are those of the training split. Raises: DataError."""
    texts = [text for each in contents for text in each.labels]
    if not texts:
        raise DataError(f"{paths[0]}: no shard holds an image ({', '.join(IMAGE_SUFFIXES)}) with its class beside it")
    first = len(next(iter(stamped.values())))
    trained = {text for each in contents[:first] for text in each.labels}
    are_numbers = _is_number(texts[0])
    if are_numbers:
        last = max((int(text) for text in trained if _is_number(text)), default=-1)
        classes = tuple(map(str, range(min(last, MAX_CLASSES - 1) + 1)))
    else:
        classes = tuple(sorted(text for text in trained if not _is_number(text)))
        require_one_spelling(Path(paths[0]).parent, classes)
    number_of = {name: number for number, name in enumerate(classes)}
    entries_N, ends, row = np.zeros(len(texts), ENTRY), 0, 0
    left_out: dict[str, dict[str, list[str]]] = {split: {} for split in stamped}
    splits = [split for split in stamped for _ in stamped[split]]
    for shard, each in enumerate(contents):
        for (offset, length, header), name, text in zip(each.rows, each.names, each.labels, strict=True):
            number = number_of.get(str(int(text)) if _is_number(text) and are_numbers else text)
            if number is None:
                known = f"0 to {len(classes) - 1}" if are_numbers else f"{len(classes)} names, such as {classes[0]!r}"
                what = f"has the class {shortened(text)}, those of the {splits[0]} shards are {known}"
                raise DataError(f"{paths[shard]}: member {shortened(name)} {what}; {_GET}")
            ends += len(os.fsencode(name))
            entries_N[row] = (shard, offset, length, number, header, ends)
            row += 1
        for kind, samples in each.left_out.items():
            left_out[splits[shard]].setdefault(kind, []).extend(samples)
            if len(left_out[splits[shard]][kind]) > MAX_LEFT_OUT:
                raise DataError(f"{samples[0]}: {kind}, as more than {MAX_LEFT_OUT:,} others: name shards of images")
    names = b"".join(os.fsencode(name) for each in contents for name in each.names)
    return Index(classes, are_numbers, stamped, left_out, entries_N, names)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 8


def _named(index: Index, read: Callable[[], bytes], path: str) -> Index:
    """Give numbered classes the names that read, of path, returns, if there is such a file. Raises: DataError."""
    if not index.are_numbers:
        return index
    try:
        names = tuple(read().decode().splitlines())
    except FileNotFoundError:
        return index
    except (OSError, UnicodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); write one name per line in UTF-8") from error
    if len(names) < len(index.classes):
        raise DataError(f"{path}: has {len(names)} lines for {len(index.classes)} classes; write one name per class")
    require_one_spelling(Path(path), names)
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise DataError(f"{path}: names {times} classes {name!r}; give each another name")
    return replace(index, classes=names)


class WebDatasetSplit:
    """Lists the images of one split of WebDataset's shards, an ImageSource."""

    def __init__(
        self,
        root: Path | str,
        split: str,
        index: Index,
        *,
        files: ShardReader | None = None,
        reopen: tuple[Any, ...] = (),
    ) -> None:
        """Open no shard yet. files: of shards that are no local files; reopen: as of PackedIndex."""
        self._root, self._reopen = root, reopen or (_reopen, root, split)
        self.classes = index.classes
        before = 0 if split == next(iter(index.shards)) else len(index.shards[next(iter(index.shards))])
        self.shards = index.shards[split]
        shards_N = index.entries_N["shard"]
        own = slice(*np.searchsorted(shards_N, [before, before + len(self.shards)]).tolist())
        self.entries_N = index.entries_N[own]
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
        """Return the shard, and the name of the member."""
        start = self.entries_N[position - 1]["name_end"] if position else self._first_name
        member = os.fsdecode(self._names[start : self.entries_N[position]["name_end"]])
        shard, _ = self.shards[self.entries_N[position]["shard"] - self._first_shard]
        return f"{self._root}/{shard}: {member}"

    def sizes(self, positions_B: np.ndarray) -> None:
        return None

    def read(self, position: int) -> bytes:
        """Read an image. Raises: StorageError if the shard is gone, cut or another one."""
        shard, offset, length, _, header, _ = self.entries_N[position].item()
        data = self._files.read(
            shard - self._first_shard,
            BLOCK_BYTES + length,
            offset - BLOCK_BYTES,
            name=lambda: self.name(position),
            again=AGAIN,
        )
        if zlib.crc32(data[:BLOCK_BYTES]) != header:
            raise replaced(self.name(position))
        return data[BLOCK_BYTES:]

    def close(self) -> None:
        self._files.close()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Pickle only what to open; the receiving process reads the index again."""
        return self._reopen[0], self._reopen[1:]


def _reopen(root: Path, split: str) -> WebDatasetSplit:
    return open_webdataset(root, split, shards=find_shards(root))
