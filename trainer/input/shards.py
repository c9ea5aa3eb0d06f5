"""Images in tar shards with an index: any image is one seek away, and its size is known before it is read.

A packed split is a folder with shard-000000.tar ... (WebDataset's convention: <key>.jpg, .png or .webp, then <key>.cls
with the label), index.npy (one ENTRY per image, in the order of the class folders) and index.json (a SplitIndex).
"""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bigbatch.errors import DataError, StorageError
from bigbatch.files import IMAGE_BYTES, LIST_BYTES, as_json, parse_json, read_plain
from bigbatch.trainer.input.base import ImageSource, written_keys
from bigbatch.trainer.input.data_root import INDEX, STAGED
from bigbatch.trainer.input.formats import encoded_size
from bigbatch.trainer.input.order import require_same_classes
from bigbatch.trainer.input.shard_files import TAR_BLOCK_BYTES, ShardFiles, ShardReader

FORMAT_VERSION = 1
ENTRIES = "index.npy"
ENTRY = np.dtype(
    [("shard", "<i4"), ("offset", "<i8"), ("length", "<i4"), ("height", "<i4"), ("width", "<i4"), ("label", "<i4")]
)
"""Index entry: offset and length of an image in bytes, its size in pixels (EXIF orientation ignored)."""

REPACK = "run `bigbatch data pack` again"


def unreadable(path: Path, error: OSError | UnicodeError) -> DataError:
    """Return the error for a file of a packed split that cannot be read."""
    if isinstance(error, PermissionError):
        remedy = "ask its owner to share it (`bigbatch data stage --shared`), or name another folder"
    else:
        remedy = f"delete it and {REPACK}"
    return DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); {remedy}")


@dataclass(frozen=True)
class Shard:
    """One tar file as it was written."""

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
    """Settings of the packer: max_side, quality, shard_bytes."""

    def to_json(self) -> str:
        return as_json(asdict(self, dict_factory=written_keys), indent=1) + "\n"


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:06d}.tar"


def parse_split_index(text: str, *, path: Path | str) -> SplitIndex:
    """Parse the output of to_json. Raises: DataError for another version, or other content.

    Refuses shard names that packing does not make: staging would write or remove files under such a path elsewhere.
    """
    try:
        found = parse_json(text)
        version = found["version"]
        if version != FORMAT_VERSION:
            raise DataError(f"{path}: has format version {version}, this bigbatch reads {FORMAT_VERSION}; pack again")
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
        raise DataError(f"{path}: is not an index of packed shards ({error!r}); delete it and {REPACK}") from error


def read_packed(folder: Path, *, classes: Sequence[str] | None = None) -> "PackedIndex":
    """Open a packed split; verifies the hash of the index, not of shards. classes: those that it must have (train's).

    Raises: DataError naming the file that is missing, cut, edited or does not match the others.
    """
    facts, path = read_split_index(folder), folder / ENTRIES
    try:
        entries_N = parse_entries(read_plain(path, most=LIST_BYTES), facts, path=path)
    except OSError as error:
        raise unreadable(path, error) from error
    if classes is not None:
        require_same_classes(folder, found=facts.classes, expected=classes)
    for shard in facts.shards:
        path = folder / shard.name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: cannot be found ({error.strerror}); {REPACK}") from error
        if found != shard.num_bytes:
            raise DataError(f"{path}: has {found} bytes, {INDEX} states {shard.num_bytes}: cut or edited; {REPACK}")
    return PackedIndex(folder, facts=facts, entries_N=entries_N)


def parse_entries(data: bytes, facts: SplitIndex, *, path: Path | str) -> np.ndarray:
    """Parse index.npy, and check it against facts. Raises: DataError."""
    if hashlib.sha256(data).hexdigest() != facts.entries_sha256:
        raise DataError(f"{path}: has another SHA-256 than {INDEX} states: cut or edited; delete it and {REPACK}")
    try:
        # in memory, not mapped: a file cut later would end the process by SIGBUS
        entries_N = np.load(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it and {REPACK}") from error
    if misfit := _misfit(facts, entries_N):
        raise DataError(f"{path}: does not fit {INDEX} ({misfit}); delete it and {REPACK}")
    return np.asarray(entries_N)


def read_split_index(folder: Path) -> SplitIndex:
    """Read a packed split's index.json. Raises: DataError."""
    path = folder / INDEX
    try:
        return parse_split_index(read_plain(path).decode(), path=path)
    except FileNotFoundError as error:
        if (folder / STAGED).exists():
            advice = "run `bigbatch data stage SRC DST` again"
            raise DataError(f"{folder}: staging has not finished, {INDEX} is missing; {advice}") from error
        raise DataError(f"{folder}: packing has not finished, {INDEX} is missing; {REPACK}") from error
    except (OSError, UnicodeError) as error:
        raise unreadable(path, error) from error


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
    # a tar member begins with a header of one block, so no image starts in the first block
    if ((offsets_N < TAR_BLOCK_BYTES) | (lengths_N <= 0) | (offsets_N + lengths_N > ends_N)).any():
        return "an entry lies outside of its shard"
    if (lengths_N > IMAGE_BYTES).any():
        return f"an image has more than {IMAGE_BYTES:,} bytes"
    if ((entries_N["label"] < 0) | (entries_N["label"] >= len(facts.classes))).any():
        return f"a label is not one of {len(facts.classes)} classes"
    if (entries_N["height"] <= 0).any() or (entries_N["width"] <= 0).any():
        return "an image has no pixels"
    return None


class PackedRoot:
    """Root with packed splits."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, split: str, *, classes: Sequence[str] | None = None) -> ImageSource:
        return read_packed(self.path / split, classes=classes)

    def classes(self, split: str) -> tuple[str, ...]:
        return read_split_index(self.path / split).classes


class PackedIndex:
    """ImageSource of a packed split; opens a shard at its first read."""

    def __init__(
        self,
        folder: Path | str,
        *,
        facts: SplitIndex,
        entries_N: np.ndarray,
        files: ShardReader | None = None,
        reopen: Callable[[], ImageSource] | None = None,
    ) -> None:
        """Open no shard yet. reopen: opens the split in another process; None: read_packed."""
        self._reopen = reopen or partial(read_packed, Path(folder))
        self.facts = facts
        self.classes = facts.classes
        self.labels_N = entries_N["label"].astype(np.int64)
        self.entries_N = entries_N
        self._paths = [f"{folder}/{shard.name}" for shard in facts.shards]
        self._files = files or ShardFiles(self._paths)

    def __len__(self) -> int:
        return len(self.entries_N)

    def name(self, position: int) -> str:
        """Return the shard's path and the number with which the image's key begins."""
        return f"{self._paths[self.entries_N[position]['shard']]}: image {key_number(position)}"

    def sizes(self, positions_B: np.ndarray) -> np.ndarray:
        entries_B = self.entries_N[positions_B]
        return np.stack([entries_B["height"], entries_B["width"]], axis=1).astype(np.int64)

    def read(self, position: int) -> bytes:
        """Read an image. Raises: StorageError if the shard is gone or cut, or has other data at that place."""
        shard, offset, length, height, width, _ = self.entries_N[position].item()
        data = self._files.read(shard, length, offset, name=lambda: self.name(position), again=REPACK)
        try:  # the same check as for an image from a class folder: a few microseconds for a JPEG
            is_same = encoded_size(data, path="", max_pixels=height * width) == (height, width)
        except DataError:
            is_same = False
        if not is_same:
            raise StorageError(
                f"{self.name(position)}: is not the image that {ENTRIES} describes, so one of the two was edited; "
                f"delete the shard and {REPACK}"
            )
        return data

    def close(self) -> None:
        self._files.close()

    def __reduce__(self) -> tuple[Callable[[], ImageSource], tuple[()]]:
        """Pickle only what to open; the receiving process opens it again."""
        return self._reopen, ()


def key_number(position: int) -> str:
    """Return the number with which the key of the image at position begins."""
    return f"{position:08d}"
