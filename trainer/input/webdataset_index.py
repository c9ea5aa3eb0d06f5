"""Make the index of WebDataset's tar shards, by reading their headers once: place, class and length of each image.

Successive members with equal names up to the first dot are one sample: an image, and its class in .cls or .json. The
index file has a line of JSON (see Index.to_bytes), one ENTRY per image, and the names of the members.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigbatch.errors import DataError, StorageError, print_line, shortened
from bigbatch.files import IMAGE_BYTES, open_plain, parse_json
from bigbatch.trainer.input.base import SPLITS
from bigbatch.trainer.input.formats import excess_bytes
from bigbatch.trainer.input.image_files import IMAGE_SUFFIXES, UNREAD_SUFFIXES, is_hidden, require_one_spelling
from bigbatch.trainer.input.shard_files import TAR_BLOCK_BYTES, Stamp
from bigbatch.trainer.input.tar_headers import Member, Window, read_members

if TYPE_CHECKING:
    from bigbatch.trainer.input.storage import Storage

VERSION = 1
ENTRY = np.dtype(
    [("shard", "<i4"), ("offset", "<i8"), ("length", "<i4"), ("label", "<i4"), ("header", "<u4"), ("name_end", "<i8")]
)
"""Shard's position in the list of both splits; offset and length in bytes; CRC-32 of the header; end of the name."""
LABEL, JSON_LABEL = "cls", "json"
JSON_KEYS = ("label", "cls", "class")
MAX_LABEL_BYTES, MAX_CLASSES, MAX_LEFT_OUT = 1 << 16, 100_000, 10_000
DOTTED, FIRST_DOT = "with a dot before its suffix", "the name of a sample ends at its first dot; replace further ones"
NUM_THREADS = 16
"""Shards indexed at the same time: on a network file system each read has to wait."""


@dataclass
class ShardContents:
    """Images of one shard, in order."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, length, and CRC-32 of the header, of each image."""
    names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def members(self) -> Iterator[tuple[str, str]]:
        """Yield the name and class of each image."""
        return zip(self.names, self.labels, strict=True)


@dataclass(frozen=True)
class Index:
    """Images of all splits of one folder."""

    classes: tuple[str, ...]
    are_numbers: bool
    """Whether the shards number the classes, so that classnames.txt may name them."""
    shards: Mapping[str, Sequence[tuple[str, Stamp]]]
    """Split -> (path relative to the folder, stamp) of each of its shards."""
    left_out: Mapping[str, Mapping[str, Sequence[str]]]
    """Split -> kind -> samples that look like images but are not read."""
    entries_N: np.ndarray
    names: bytes

    def require(self, split: str, *, where: Path | str) -> None:
        """Raise DataError if a split has no shards. where: their folder, for the message."""
        if split not in self.shards:
            raise DataError(f"{where}: holds shards for {' and '.join(self.shards)}, but none for {split}")

    def to_bytes(self) -> bytes:
        """Return the content of the index file, for parse_index."""
        rest = self.entries_N.tobytes() + self.names
        head: dict[str, Any] = {
            "version": VERSION,
            "sha256": hashlib.sha256(rest).hexdigest(),
            "num_images": len(self.entries_N),
            "are_numbers": self.are_numbers,
            "classes": self.classes,
            "shards": self.shards,
            "left_out": self.left_out,
        }
        return json.dumps(head).encode() + b"\n" + rest


def parse_index(data: bytes) -> Index:
    """Parse the content of an index file. Raises: ValueError, TypeError, KeyError or AttributeError for other bytes."""
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
        raise ValueError("a class that occurs twice")
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
    if ((offsets_N < TAR_BLOCK_BYTES) | (lengths_N < 0) | (offsets_N + lengths_N > sizes[shards_N])).any():
        raise ValueError("an entry outside of its shard")
    if (lengths_N > IMAGE_BYTES).any():
        raise ValueError("an entry larger than an image")
    if ((entries_N["label"] < 0) | (entries_N["label"] >= len(index.classes))).any():
        raise ValueError("a label of no class")
    return index


def make_index(
    root: Path | str, stamped: Mapping[str, Sequence[tuple[str, Stamp]]], *, storage: "Storage | None" = None
) -> Index:
    """Make the index by reading all shards once. Raises: DataError naming shard and member; StorageError."""
    num_shards = sum(map(len, stamped.values()))
    print_line(f"indexing {num_shards:,} WebDataset shards of {root}, once", file=sys.stderr)
    paths = [f"{root}/{name}" for split in stamped for name, _ in stamped[split]]
    sizes = [size for split in stamped for _, (size, _) in stamped[split]]
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="bigbatch-index") as threads:
        try:
            contents = list(threads.map(partial(index_shard, storage=storage), paths, sizes))
        finally:
            threads.shutdown(cancel_futures=True)
    return _join_shards(stamped, paths, contents)


@contextmanager
def _window(path: str, num_bytes: int, storage: "Storage | None") -> Iterator[Window]:
    if storage is not None:
        name = path.removeprefix(f"{storage.url}/")

        def fetch(length: int, offset: int) -> bytes:
            # a server answers a range after the file's end with an error
            return storage.fetch(name, offset, min(offset + length, num_bytes)) if offset < num_bytes else b""

        # each request has a latency: read all bytes in few requests
        yield Window(fetch, num_bytes=1 << 23)
        return
    with open_plain(path) as file:
        yield Window(lambda length, offset: os.pread(file.fileno(), length, offset))


def index_shard(path: str, num_bytes: int, *, storage: "Storage | None" = None) -> ShardContents:
    """Return the images of one shard, with their labels. Raises: DataError naming shard and member."""
    found, seen, key, sample = ShardContents(), set[str](), "", dict[str, Member]()
    try:
        with _window(path, num_bytes, storage) as window:
            for member in read_members(window, path=path, num_bytes=num_bytes):
                folder, slash, name = member.name.rpartition("/")
                stem, dot, suffix = name.partition(".")
                # a hidden file would split a sample; WebDataset, too, skips members without a suffix and its own
                if is_hidden(name) or not dot or _is_meta(member.name):
                    continue
                if (this := folder + slash + stem) != key:
                    _add_sample(path, key, sample, window, found)
                    if this in seen:
                        why = f" ({FIRST_DOT})" if "." in suffix else ""
                        twice = f"{path}: member {shortened(member.name)}: its sample occurs twice{why}"
                        raise DataError(f"{twice}; {_REMEDY}")
                    key, sample = this, {}
                    seen.add(key)
                if (suffix := suffix.lower()) in sample:
                    raise DataError(f"{path}: member {shortened(member.name)} occurs twice; {_REMEDY}")
                sample[suffix] = member
            _add_sample(path, key, sample, window, found)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}); check its permissions and disk") from error
    return found


_REMEDY = "get another shard, or remove it"
_is_meta = re.compile(r"(^|/)__[^/]*__($|/|\.)").search


def _add_sample(path: str, key: str, sample: Mapping[str, Member], window: Window, found: ShardContents) -> None:
    """Add a whole sample to found. Raises: DataError."""
    images = [member for suffix, member in sample.items() if f".{suffix}" in IMAGE_SUFFIXES]
    if not images:
        dotted = [member.name for suffix, member in sample.items() if suffix.endswith(IMAGE_SUFFIXES)]
        if dotted:
            found.left_out[DOTTED] += [f"{path}: {name}" for name in dotted]
        elif sample:
            unread = (f".{suffix}" for suffix in sample if f".{suffix}" in UNREAD_SUFFIXES)
            found.left_out[next(unread, "sample without an image")].append(f"{path}: {key}")
        return
    image = images[0]
    if len(images) > 1:
        raise DataError(f"{path}: members {' and '.join(m.name for m in images)}: two images in one sample; {_REMEDY}")
    if excess := excess_bytes(image.num_bytes):
        raise DataError(f"{path}: member {shortened(image.name)}: {excess}; {_REMEDY}")
    found.labels.append(_label(path, image, sample, window))
    found.rows.append((image.offset, image.num_bytes, image.header))
    found.names.append(image.name)


def _label(path: str, image: Member, sample: Mapping[str, Member], window: Window) -> str:
    """Return a sample's class as text. Raises: DataError."""
    member = sample.get(LABEL) or sample.get(JSON_LABEL)
    if member is None:
        beside = f"no .{LABEL} and no .{JSON_LABEL} beside it"
        raise DataError(f"{path}: member {shortened(image.name)} has no class: {beside}; {_REMEDY}")
    where = f"{path}: member {shortened(member.name)}"
    if member.num_bytes > MAX_LABEL_BYTES:
        raise DataError(f"{where}: claims {member.num_bytes:,} bytes, more than a class takes; {_REMEDY}")
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
        raise DataError(f"{where}: states no class, such as {{'label': 3}}, but {shortened(label)}; {_REMEDY}")
    if not (text := str(label)).isprintable() or not 0 < len(text.encode()) < 200:
        raise DataError(f"{where}: {shortened(text)} is not a name of a class; {_REMEDY}")
    return text


def _join_shards(
    stamped: Mapping[str, Sequence[tuple[str, Stamp]]], paths: Sequence[str], contents: Sequence[ShardContents]
) -> Index:
    """Return the index of all splits' shards; labels are those of the training split. Raises: DataError."""
    texts = [text for each in contents for text in each.labels]
    if not texts:
        dotted = [name for each in contents for name in each.left_out.get(DOTTED, ())]
        why = f"; {len(dotted):,} names, such as {dotted[0]}, have a further dot: {FIRST_DOT}" if dotted else ""
        none = f"no shard holds an image ({', '.join(IMAGE_SUFFIXES)}) with its class beside it"
        raise DataError(f"{paths[0]}: {none}{why}")
    first = len(next(iter(stamped.values())))
    trained = {text for each in contents[:first] for text in each.labels}
    are_numbers = all(map(_is_number, trained))
    if are_numbers:
        classes = tuple(map(str, range(min(max(map(int, trained), default=-1), MAX_CLASSES - 1) + 1)))
    else:
        classes = tuple(sorted(trained))
        if any(map(_is_number, classes)):
            _require_names(paths[:first], contents[:first])
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
                raise DataError(f"{paths[shard]}: member {shortened(name)} {what}; {_REMEDY}")
            ends += len(os.fsencode(name))
            entries_N[row] = (shard, offset, length, number, header, ends)
            row += 1
        for kind, samples in each.left_out.items():
            left_out[splits[shard]].setdefault(kind, []).extend(samples)
            if len(left_out[splits[shard]][kind]) > MAX_LEFT_OUT:
                raise DataError(f"{samples[0]}: {kind}, like more than {MAX_LEFT_OUT:,} others: name shards of images")
    names = b"".join(os.fsencode(name) for each in contents for name in each.names)
    return Index(classes, are_numbers, stamped, left_out, entries_N, names)


def _require_names(paths: Sequence[str], contents: Sequence[ShardContents]) -> None:
    """Check classes of which some are numbers: digits and letters are names. Raises: DataError for another mix."""
    members = [(path, *each) for path, shard in zip(paths, contents, strict=True) for each in shard.members()]
    kinds = Counter(_is_number(text) for *_, text in members)
    rare = kinds[True] <= kinds[False]
    path, name, text = next(each for each in members if _is_number(each[-1]) == rare)
    other = next(other for *_, other in members if _is_number(other) != rare)
    mix = f"{text!r}, and others such as {other!r}: numbers and names"
    if any(len(text) > 1 for *_, text in members):
        how = "write all as numbers, or all as names, such as class_7"
        raise DataError(f"{path}: member {shortened(name)} has the class {mix}; {how}")
    print_line(f"{path}: the classes are {mix}; all are read as names", file=sys.stderr)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 8
