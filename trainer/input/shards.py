"""Images in tar shards with an index: any sample is one seek away, and its size is known before it is read.

A packed split is a folder with shard-000000.tar ... (WebDataset's convention: <key>.jpg, .png or .webp, then <key>.cls
with the label), index.npy (one Entry per image, in the order of the class folders) and index.json (the Facts).
"""

import errno
import hashlib
import io
import json
import os
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from bigbatch.errors import DataError, StorageError
from bigbatch.files import parse_json
from bigbatch.trainer.input.base import ImageSource, written_keys
from bigbatch.trainer.input.formats import encoded_size
from bigbatch.trainer.input.image_files import list_split
from bigbatch.trainer.input.listed import listed_classes, read_images
from bigbatch.trainer.input.order import read_problem, require_same_classes

FORMAT_VERSION = 1
FACTS, ENTRIES, SETTINGS = "index.json", "index.npy", "pack.json"
ENTRY = np.dtype(
    [("shard", "<i4"), ("offset", "<i8"), ("length", "<i4"), ("height", "<i4"), ("width", "<i4"), ("label", "<i4")]
)
"""Index entry: offset and length of an image in bytes, its size in pixels (EXIF orientation ignored)."""
BLOCK_BYTES = 512
AGAIN = "run `bigbatch data pack` again"


@dataclass(frozen=True)
class Shard:
    """Describes one tar file as it was written."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitIndex:
    """Contents of index.json."""

    version: int
    classes: tuple[str, ...]
    num_images: int
    entries_sha256: str
    """SHA-256 of the file index.npy, which decides the labels."""
    shards: tuple[Shard, ...]
    made: dict[str, int | None]
    """The settings of the packer: max_side, quality, shard_bytes."""

    def to_json(self) -> str:
        return json.dumps(asdict(self, dict_factory=written_keys), indent=1) + "\n"


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:06d}.tar"


def parse_facts(text: str, *, path: Path) -> SplitIndex:
    """Read what to_json wrote. Raises: DataError for another version, or what is no such file.

    Names of shards are those that they get when they are packed: one that leads elsewhere would be written, or removed,
    where the split is staged.
    """
    try:
        found = parse_json(text)
        version = found["version"]
        if version != FORMAT_VERSION:
            raise DataError(f"{path}: has format version {version}, this bigbatch reads {FORMAT_VERSION}; pack anew")
        for number, shard in enumerate(found["shards"]):
            if shard["name"] != shard_name(number):
                raise ValueError(f"shard {number} is named {shard['name']!r} and not {shard_name(number)}")
        return SplitIndex(
            version=version,
            classes=tuple(map(str, found["classes"])),
            num_images=int(found["num_pictures"]),
            entries_sha256=str(found["entries_sha256"]),
            shards=tuple(Shard(each["name"], int(each["num_bytes"]), str(each["sha256"])) for each in found["shards"]),
            made=dict(found["made"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path}: is no index of packed shards ({error!r}); delete it and {AGAIN}") from error


def read_packed(folder: Path, *, classes: Sequence[str] | None = None) -> "PackedIndex":
    """Open a packed split; classes, if given, are those that it must have (train's). Hashes the index, no shard.

    Raises: DataError naming the file that is missing, cut, edited or does not fit the others.
    """
    facts, entries_N = read_entries(folder)
    if classes is not None:
        require_same_classes(folder, found=facts.classes, expected=classes)
    for shard in facts.shards:
        path = folder / shard.name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: cannot be found ({error.strerror}); {AGAIN}") from error
        if found != shard.num_bytes:
            raise DataError(f"{path}: has {found} bytes, {FACTS} states {shard.num_bytes}: cut or edited; {AGAIN}")
    return PackedIndex(folder, facts=facts, entries_N=entries_N)


def read_entries(folder: Path) -> tuple[SplitIndex, np.ndarray]:
    """Read the index of a packed split, whether its shards exist or not. Raises: DataError."""
    facts, path = read_facts(folder), folder / ENTRIES
    try:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != facts.entries_sha256:
            raise DataError(f"{path}: has another SHA-256 than {FACTS} states: cut or edited; delete it and {AGAIN}")
        # into memory, not mapped: a file that is cut later must not end the process
        entries_N = np.load(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it and {AGAIN}") from error
    if misfit := _misfit(facts, entries_N):
        raise DataError(f"{path}: does not fit {FACTS} ({misfit}); delete it and {AGAIN}")
    return facts, entries_N


def read_facts(folder: Path) -> SplitIndex:
    """Read what a packed split states about itself. Raises: DataError."""
    path = folder / FACTS
    try:
        return parse_facts(path.read_text(encoding="utf-8"), path=path)
    except FileNotFoundError as error:
        raise DataError(f"{folder}: packing has not finished, {FACTS} is missing; {AGAIN}") from error
    except (OSError, UnicodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it and {AGAIN}") from error


def _misfit(facts: SplitIndex, entries_N: np.ndarray) -> str | None:
    """Return the fault of the index, or None."""
    if entries_N.dtype != ENTRY or entries_N.shape != (facts.num_images,) or not facts.num_images:
        return f"{entries_N.shape} entries of {entries_N.dtype} for {facts.num_images} images"
    if list(facts.classes) != sorted(set(facts.classes)):
        return "classes are not in order"
    shards_N, offsets_N, lengths_N = (entries_N[name] for name in ("shard", "offset", "length"))
    if ((shards_N < 0) | (shards_N >= len(facts.shards))).any():
        return f"an entry lies in none of {len(facts.shards)} shards"
    ends_N = np.array([shard.num_bytes for shard in facts.shards])[shards_N]
    # a tar member's header is a block, so no image begins before the first one ends
    if ((offsets_N < BLOCK_BYTES) | (lengths_N <= 0) | (offsets_N + lengths_N > ends_N)).any():
        return "an entry lies outside of its shard"
    if ((entries_N["label"] < 0) | (entries_N["label"] >= len(facts.classes))).any():
        return f"a label is none of {len(facts.classes)} classes"
    if (entries_N["height"] <= 0).any() or (entries_N["width"] <= 0).any():
        return "an image has no pixels"
    return None


def is_packed(folder: Path) -> bool:
    """Return whether a split holds, or is to hold, shards."""
    return (folder / FACTS).exists() or (folder / SETTINGS).exists()


def open_split(root: Path, split: str, *, classes: Sequence[str] | None = None) -> ImageSource:
    """Open root/split, packed, listed or as class folders; classes, if given, are those that it must have (train's).

    Raises: DataError, as read_packed and read_images do.
    """
    folder = Path(root) / split
    return read_packed(folder, classes=classes) if is_packed(folder) else read_images(root, split, classes=classes)


def read_classes(root: Path, split: str) -> tuple[str, ...] | None:
    """Return sorted class names of root/split, or of the list root; None if there is no such split.

    Images in folders are not listed for it. Raises: DataError.
    """
    if Path(root).is_file():
        return listed_classes(Path(root))
    folder = Path(root) / split
    if not folder.is_dir():
        return None
    if is_packed(folder):
        return read_facts(folder).classes
    return tuple(list_split(folder).folders)


class _ShardFile:
    """File that closes after its last reader, so that no reader loses its descriptor or reads another file by it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, length: int, offset: int) -> bytes:
        """Read length bytes, or fewer at the file's end; a network file system may hand over parts. Raises: OSError."""
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length and (more := os.pread(self._descriptor, length - len(data), offset + len(data))):
            data += more
        return data

    def __del__(self) -> None:
        os.close(self._descriptor)


class PackedIndex:
    """Lists the images of one packed split, an ImageSource; opens a shard when it is first read from."""

    def __init__(self, folder: Path, *, facts: SplitIndex, entries_N: np.ndarray, max_open: int | None = None) -> None:
        """Open no shard yet. max_open: most open shards, by default a third of the process's limit."""
        self._folder = folder
        self.facts = facts
        self.classes = facts.classes
        self.labels_N = entries_N["label"].astype(np.int64)
        self.entries_N = entries_N
        self._paths = [f"{folder}/{shard.name}" for shard in facts.shards]
        # a third of the limit: training has two splits, and sockets and libraries want the rest
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 65536 if soft == resource.RLIM_INFINITY else max(1, soft // 3)
        self._open = lru_cache(max_open or most)(lambda path, _: _ShardFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
        self._errors: Counter[str] = Counter()
        """Read errors of each shard: after one it is opened again, and the others stay open."""

    def __len__(self) -> int:
        return len(self.entries_N)

    def name(self, position: int) -> str:
        """Return the shard, and the number with which the image's key in it begins."""
        return f"{self._paths[self.entries_N[position]['shard']]}: image {key_number(position)}"

    def sizes(self, positions_B: np.ndarray) -> np.ndarray:
        entries_B = self.entries_N[positions_B]
        return np.stack([entries_B["height"], entries_B["width"]], axis=1).astype(np.int64)

    def read(self, position: int) -> bytes:
        """Read an image. Raises: StorageError if the shard is gone or cut, or holds something else at that place."""
        shard, offset, length, height, width, _ = self.entries_N[position].item()
        path = self._paths[shard]
        try:
            data = self._opened(path).read(length, offset)
        except OSError as error:
            self._errors[path] += 1  # a stale handle stays so, and the path may be fine
            raise StorageError(f"{self.name(position)}: {read_problem(error, file='the shard')}") from error
        if len(data) != length:
            raise StorageError(f"{self.name(position)}: the shard was cut since the start; {AGAIN}")
        try:  # what is checked of an image from a class folder, too: a few microseconds for a JPEG
            is_same = encoded_size(data, path="", max_pixels=height * width) == (height, width)
        except DataError:
            is_same = False
        if not is_same:
            raise StorageError(
                f"{self.name(position)}: is not the image that {ENTRIES} describes, so one of the two was edited; "
                f"delete the shard and {AGAIN}"
            )
        return data

    def _opened(self, path: str) -> _ShardFile:
        while True:
            try:
                return self._open(path, self._errors[path])
            except OSError as error:
                if error.errno != errno.EMFILE or not self._open.cache_info().currsize:
                    raise
            # the others of these files make room if the process may open no more
            self._open.cache_clear()

    def close(self) -> None:
        self._open.cache_clear()

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        """Pickle only the folder; the receiving process opens it again."""
        return read_packed, (self._folder,)


def key_number(position: int) -> str:
    """Return how the key of the image at position begins."""
    return f"{position:08d}"
