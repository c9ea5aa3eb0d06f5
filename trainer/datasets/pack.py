"""Pack class folders or a list into shards (see shards.py): in parallel, resumable; equal input gives equal bytes."""

import hashlib
import io
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from bigbatch.errors import ConfigError, DataError
from bigbatch.files import as_json, parse_json, read_plain, replacing
from bigbatch.trainer.datasets.processes import Advance, in_parallel, require_workers, show_nothing
from bigbatch.trainer.datasets.verify_shards import COLUMNS, ShardRecord, read_shard
from bigbatch.trainer.input.data_root import INDEX, SETTINGS
from bigbatch.trainer.input.formats import MAX_PIXELS, PNG_START, encoded_size, is_webp, open_image
from bigbatch.trainer.input.listed import read_listed
from bigbatch.trainer.input.order import ImageIndex, describe_left_out, read_file, read_index
from bigbatch.trainer.input.shard_files import TAR_BLOCK_BYTES
from bigbatch.trainer.input.shards import (
    ENTRIES,
    ENTRY,
    FORMAT_VERSION,
    Shard,
    SplitIndex,
    key_number,
    read_packed,
    read_split_index,
    shard_name,
)
from bigbatch.trainer.input.shown import orientation_option, shown
from bigbatch.trainer.input.webdataset import find_shards
from bigbatch.words import count

UNFINISHED = ".unfinished"
_REMEDY = "delete its folder to pack again, or name another DST"


@dataclass(frozen=True)
class PackRecipe:
    """Settings that, with the images, determine the bytes of the shards."""

    shard_bytes: int = 512_000_000
    """Limit of a shard, by the sizes of the images before shrinking; a larger image gets its own shard."""
    max_side: int | None = None
    """An image whose shorter side is longer is shrunk to this side; None changes no image."""
    quality: int = 90
    """Quality of the JPEGs of shrunk images."""
    max_pixels: int = MAX_PIXELS
    """An image that states more is refused; does not change any bytes."""

    def __post_init__(self) -> None:
        legal = {
            "shard_bytes": (self.shard_bytes >= 1, "1 or more"),
            "max_side": (self.max_side is None or self.max_side >= 1, "1 or more pixels"),
            "quality": (1 <= self.quality <= 100, "1 to 100"),
        }
        for key, (is_legal, hint) in legal.items():
            if not is_legal:
                raise ConfigError(f"{key}={getattr(self, key)} is not possible; give {hint}")

    def made(self) -> dict[str, int | None]:
        """Return the settings as index.json states them; quality is None if no image can be shrunk."""
        quality = None if self.max_side is None else self.quality
        return {"shard_bytes": self.shard_bytes, "max_side": self.max_side, "quality": quality}


@dataclass(frozen=True)
class SplitPlan:
    """State of packing one split."""

    folder: Path
    index: ImageIndex
    shards: list[range]
    """Positions of the images of each shard."""
    bytes_in: int
    source: str
    """Digest that changes if an image is added or removed, or its size, modification time or label changes."""


@dataclass(frozen=True)
class PackSummary:
    """Result of a call of pack; num_packed excludes images that an earlier call packed."""

    num_images: int
    num_packed: int
    num_shards: int
    bytes_in: int
    bytes_out: int
    seconds: float

    def __str__(self) -> str:
        if not self.num_packed:
            return f"{count(self.num_images, 'image')} in {count(self.num_shards, 'shard')}, complete already"
        earlier = self.num_images - self.num_packed
        return (
            f"{count(self.num_images, 'image')} in {count(self.num_shards, 'shard')}"
            f"{f' ({earlier} images by an earlier call)' if earlier else ''}, "
            f"{_size(self.bytes_in)} in, {_size(self.bytes_out)} out, "
            f"{self.seconds:.1f} s, {self.num_packed / self.seconds:.0f} images/s"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.4g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.4g} MB"


def pack(
    source: Path,
    target: Path,
    *,
    recipe: PackRecipe,
    splits: Sequence[str] = ("train", "val"),
    num_workers: int = 1,
    on_progress: Advance = show_nothing,
    on_left_out: Callable[[str], object] = lambda line: None,
) -> PackSummary:
    """Write target/<split>/ from source/<split>/<class>/<image>, or from the list source.

    Continues an unfinished earlier call. num_workers processes share the work (1: none are started). on_progress gets
    (images done, images in all); on_left_out first gets a line that counts the files that look like images but are
    not packed. Every image is decoded once. Raises: ConfigError for an impossible setting;
    DataError naming a bad image, a target that holds something else, or a disk that cannot be written.
    """
    is_name = [bool(split) and "/" not in split and not split.startswith(".") for split in splits]
    if not splits or not all(is_name) or len(set(splits)) < len(splits):
        names = "different names of folders, such as train,val"
        raise ConfigError(f"splits={','.join(splits)!r} is not possible; give {names}")
    require_workers(num_workers)
    start, plans = time.monotonic(), _plan_splits(source, target, splits=splits, recipe=recipe)
    total = sum(len(plan.index) for plan in plans)
    if left_out := describe_left_out(source, *(plan.index for plan in plans)):
        on_left_out(left_out)
    num_done = num_packed = 0
    for plan in plans:
        stated: dict[str, Shard] = {}
        with suppress(DataError):  # an index that is missing or broken is made again
            stated = {shard.name: shard for shard in read_split_index(plan.folder).shards}
            read_packed(plan.folder)
            num_done += len(plan.index)
            continue
        make, records = partial(_make_shard, plan.folder, recipe, stated), []
        index, labels_N = plan.index, plan.index.labels_N
        # a task has the names of its own images only, to save memory in each process
        tasks = [
            (number, [(position, index.name(position), int(labels_N[position])) for position in positions])
            for number, positions in enumerate(plan.shards)
        ]
        for record, is_new in in_parallel(make, tasks, num_workers=num_workers):
            records.append(record)
            num_packed += len(record.rows) * is_new
            num_done += len(record.rows)
            on_progress(num_done, total)
        _write_index(plan, records, recipe=recipe)
    return PackSummary(
        num_images=total,
        num_packed=num_packed,
        num_shards=sum(len(plan.shards) for plan in plans),
        bytes_in=sum(plan.bytes_in for plan in plans),
        bytes_out=sum(shard.num_bytes for plan in plans for shard in read_split_index(plan.folder).shards),
        seconds=time.monotonic() - start,
    )


def _plan_splits(source: Path, target: Path, *, splits: Sequence[str], recipe: PackRecipe) -> list[SplitPlan]:
    """List all splits, then claim a folder for each; all splits use the labels of the first."""
    if found := find_shards(source):
        some = next(iter(found.values()))[0]
        raise DataError(f"{some}: is a WebDataset shard: training reads it as it is; name {source} in data.root")
    plans: list[SplitPlan] = []
    read = read_listed if source.is_file() else read_index
    for split in splits:
        index = read(source, split, classes=plans[0].index.classes if plans else None)
        sizes_N, digest = _sizes_and_digest(index)
        shards = cut_into_shards(sizes_N, shard_bytes=recipe.shard_bytes)
        plans.append(SplitPlan(target / split, index, shards, sum(sizes_N), digest))
    # after all splits were listed, so that a bad split leaves no folder behind
    for plan in plans:
        _prepare_folder(plan.folder, {"version": FORMAT_VERSION, **recipe.made(), "source": plan.source})
    return plans


def _sizes_and_digest(index: ImageIndex) -> tuple[list[int], str]:
    """Return the size of each image in bytes, and a digest of all paths, labels, sizes and modification times."""

    def look(position: int) -> tuple[int, int]:
        try:
            found = os.stat(index.name(position))
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror}); was it moved?") from error
        return found.st_size, found.st_mtime_ns

    sizes_N, digest = [], hashlib.sha256()
    # threads, since a network file system is slow to answer; in parts, since a million waiting calls take memory
    with ThreadPoolExecutor(16) as threads:
        for first in range(0, len(index), 10_000):
            part = range(first, min(first + 10_000, len(index)))
            for position, (size, time_ns) in zip(part, threads.map(look, part), strict=True):
                sizes_N.append(size)
                stamp = f"{index.paths[position]}\0{index.labels_N[position]}\0{size}\0{time_ns}\n"
                digest.update(stamp.encode("utf-8", "surrogateescape"))
    return sizes_N, digest.hexdigest()


def cut_into_shards(sizes_N: Sequence[int], *, shard_bytes: int) -> list[range]:
    """Return the positions of each shard's images, in order: as many as fit into shard_bytes of tar, at least one."""
    firsts, filled = [0], 0
    for position, size in enumerate(sizes_N):
        needed = TAR_BLOCK_BYTES + padded(size) + 2 * TAR_BLOCK_BYTES  # the last two blocks are for the label
        if filled and filled + needed > shard_bytes:
            firsts.append(position)
            filled = 0
        filled += needed
    return [range(first, end) for first, end in pairwise((*firsts, len(sizes_N)))]


def padded(num_bytes: int) -> int:
    return -(-num_bytes // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES


def _prepare_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings into folder, and remove unusable files of earlier calls. Raises: DataError."""
    path = folder / SETTINGS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep_unfinished(folder)
        found = parse_json(read_plain(path)) if path.exists() else None
        if found is None and any(folder.iterdir()):
            raise DataError(f"{folder}: holds something else than shards of `bigbatch data pack`; name another DST")
        if found == settings:
            return
        if found is not None:
            was = found if isinstance(found, dict) else {}
            apart = [key for key in settings if key != "source" and was.get(key) != settings[key]]
            if apart:
                changes = ", ".join(f"{key} {was.get(key)} -> {settings[key]}" for key in apart)
                raise DataError(f"{folder}: was packed with other settings ({changes}); {_REMEDY}")
            if (folder / INDEX).exists():
                raise DataError(f"{folder}: was packed from other images, or by an older version; {_REMEDY}")
            for shard in (*folder.glob("shard-*.tar"), *folder.glob(".shard-*.json")):
                shard.unlink()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read or made ({error}); {_REMEDY}") from error
    with new_shard_file(path) as file:
        file.write((as_json(settings, indent=1) + "\n").encode())


def _make_shard(
    folder: Path, recipe: PackRecipe, stated: dict[str, Shard], task: tuple[int, list[tuple[int, str, int]]]
) -> tuple[ShardRecord, bool]:
    """Return the shard's record, and whether it was written: an equal one of an earlier call is kept."""
    number, images = task
    path = folder / shard_name(number)
    if path.exists():
        with suppress(DataError):  # if the file was cut or damaged since, write it again
            record = read_shard(path, expected=stated.get(path.name))
            if [row[0] for row in record.rows] == [image[0] for image in images]:
                return record, False
    return write_shard(path, recipe, images), True


def write_shard(target: Path, recipe: PackRecipe, images: Sequence[tuple[int, str, int]]) -> ShardRecord:
    """Write one tar file, whole or not at all: equal recipe and images give equal bytes. Raises: DataError.

    images: position in the split, path and label of each.
    """
    digest, rows, num_bytes, most = hashlib.sha256(), [], 0, recipe.max_pixels
    with new_shard_file(target) as file:

        def write(*parts: bytes) -> None:
            nonlocal num_bytes
            for part in parts:
                file.write(part)
                digest.update(part)
                num_bytes += len(part)

        for position, path, label in images:
            data = shrink(read_file(path), path=path, max_side=recipe.max_side, quality=recipe.quality, max_pixels=most)
            # readers end the key at the first dot; the number makes it unique even if two names are equal
            key = f"{key_number(position)}-{Path(path).stem.replace('.', '_')}"
            suffix = "png" if data.startswith(PNG_START) else "webp" if is_webp(data) else "jpg"
            size = encoded_size(data, path=path, max_pixels=most)
            header, block = tar_member(f"{key}.{suffix}", data)
            # the offset of the image's data after its header, to which readers seek
            rows.append((position, num_bytes + len(header), len(data), *size, label))
            write(header, block, *tar_member(f"{key}.cls", str(label).encode()))
        write(bytes(2 * TAR_BLOCK_BYTES))  # the end mark
    return ShardRecord(Shard(target.name, num_bytes, digest.hexdigest()), rows)


def tar_member(name: str, data: bytes) -> tuple[bytes, bytes]:
    """Return a header, and data padded to whole blocks. Without time and owner, so name and data decide the bytes."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return header, data.ljust(padded(len(data)), b"\0")


def shrink(data: bytes, *, path: str, max_side: int | None, quality: int, max_pixels: int = MAX_PIXELS) -> bytes:
    """Return data unchanged, or as a JPEG whose shorter side is max_side if it was longer; decodes it in either case.

    Shrinks antialiased (Lanczos) with the same aspect ratio, in grey or RGB. Of EXIF only an orientation stays, so that
    data.exif_orientation has the same effect. An image with transparent pixels stays: JPEG has none.
    Raises: DataError naming path.
    """
    image = open_image(data, path=path, max_pixels=max_pixels)
    short = min(image.size)
    if max_side is None or short <= max_side:
        return data
    if shown(data, path=path, background="white", is_turned=False, max_pixels=max_pixels):
        return data
    image = image if image.mode == "L" else image.convert("RGB")
    width, height = (round(side * max_side / short) for side in image.size)
    buffer = io.BytesIO()
    try:
        image.resize((width, height), Image.Resampling.LANCZOS).save(
            buffer, "JPEG", quality=quality, **orientation_option(data)
        )
    except (OSError, ValueError) as error:  # no side of a JPEG exceeds 65,500 pixels
        reason = f"shrunk to {width} x {height} it cannot be saved as JPEG ({error})"
        raise DataError(f"{path}: {reason}; remove it, or give another --short-side") from error
    return buffer.getvalue()


def _write_index(plan: SplitPlan, records: list[ShardRecord], *, recipe: PackRecipe) -> None:
    """Write index.npy, then index.json with its hash: only index.json marks the split as complete."""
    entries_N = np.zeros(len(plan.index), ENTRY)
    entries_N["shard"] = np.repeat(np.arange(len(records)), [len(record.rows) for record in records])
    rows_N6 = np.concatenate([np.array(record.rows, np.int64) for record in records])
    for column, name in enumerate(COLUMNS, 1):
        entries_N[name] = rows_N6[:, column]
    buffer = io.BytesIO()
    np.save(buffer, entries_N, allow_pickle=False)
    facts = SplitIndex(
        version=FORMAT_VERSION,
        classes=plan.index.classes,
        num_images=len(plan.index),
        entries_sha256=hashlib.sha256(buffer.getbuffer()).hexdigest(),
        shards=tuple(record.shard for record in records),
        made=recipe.made(),
    )
    for name, data in ((ENTRIES, buffer.getvalue()), (INDEX, facts.to_json().encode())):
        with new_shard_file(plan.folder / name) as file:
            file.write(data)
    # opens the split as a run does, to raise its errors now
    read_packed(plan.folder)


@contextmanager
def new_shard_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that gets the name path once it is whole and on disk. Raises: DataError with the path."""
    try:
        with replacing(path, suffix=UNFINISHED, sync=True) as file:
            yield file
    except OSError as error:
        # another pack may have removed it as the leftover of a killed one
        is_swept = isinstance(error, FileNotFoundError)
        todo = "is another pack writing here? let one end" if is_swept else "make room"
        advice = f"{todo}, then run the same command again: finished shards are kept"
        raise DataError(f"{path}: cannot be written ({error.strerror or error}); {advice}") from error


def sweep_unfinished(folder: Path) -> None:
    """Remove files that killed writers left in folder."""
    for left in folder.glob(f".*{UNFINISHED}"):
        left.unlink(missing_ok=True)
