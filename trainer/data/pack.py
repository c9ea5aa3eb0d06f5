"""From class folders to packed shards (see shards.py): in parallel, resumable, the same input gives the same bytes."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bigbatch.trainer.data.imagenet import PictureIndex, read_index
from bigbatch.trainer.data.processes import in_parallel
from bigbatch.trainer.data.shard_writer import UNFINISHED, Recipe, Record, ShardPlan, padded, replacing, write_shard
from bigbatch.trainer.data.shards import (
    BLOCK_BYTES,
    ENTRIES,
    ENTRY,
    FACTS,
    FORMAT_VERSION,
    SETTINGS,
    Facts,
    Shard,
    read_entries,
    read_packed,
)
from bigbatch.trainer.errors import ConfigError, DataError

_LABEL_BYTES = 2 * BLOCK_BYTES
_NEW = "delete its folder to pack anew, or name another DST"


@dataclass(frozen=True)
class SplitPlan:
    """One split on its way from index to folder."""

    folder: Path
    index: PictureIndex
    shards: list[ShardPlan]
    bytes_in: int


@dataclass(frozen=True)
class Summary:
    """What a call of pack did; num_packed leaves out what an earlier call had packed already."""

    num_pictures: int
    num_packed: int
    num_shards: int
    bytes_in: int
    bytes_out: int
    seconds: float

    def __str__(self) -> str:
        if not self.num_packed:
            return f"{self.num_pictures} pictures in {self.num_shards} shards, complete already"
        earlier = self.num_pictures - self.num_packed
        return (
            f"{self.num_pictures} pictures in {self.num_shards} shards"
            f"{f' ({earlier} pictures by an earlier call)' if earlier else ''}, "
            f"{self.bytes_in / 1e9:.4g} GB in, {self.bytes_out / 1e9:.4g} GB out, "
            f"{self.seconds:.1f} s, {self.num_packed / self.seconds:.0f} pictures/s"
        )


def cut_into_shards(sizes_N: Sequence[int], *, shard_bytes: int) -> list[range]:
    """Positions of each shard, in order: as many pictures as fit into shard_bytes of tar, at least one."""
    firsts, filled = [0], 0
    for position, size in enumerate(sizes_N):
        needed = BLOCK_BYTES + padded(size) + _LABEL_BYTES
        if filled and filled + needed > shard_bytes:
            firsts.append(position)
            filled = 0
        filled += needed
    return [range(first, end) for first, end in zip(firsts, [*firsts[1:], len(sizes_N)], strict=True)]


def pack(
    source: Path,
    target: Path,
    *,
    recipe: Recipe,
    splits: Sequence[str] = ("train", "val"),
    num_workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Write target/<split>/ from source/<split>/<class>/<picture>, or finish what an earlier call left.

    num_workers processes share the work (1: none are started). on_progress gets (pictures done, pictures in
    all). Every picture is decoded once. Raises: ConfigError for an impossible setting; DataError naming a bad
    picture, a target that holds something else, or a disk that cannot be written.
    """
    _require_possible(splits, num_workers)
    start, plans = time.monotonic(), _plan_splits(source, target, splits=splits, recipe=recipe)
    total = sum(len(plan.index) for plan in plans)
    num_done = num_packed = bytes_out = 0
    for plan in plans:
        records = _finished_shards(plan)
        todo = [shard for shard in plan.shards if shard.number not in records]
        num_done += len(plan.index) - sum(len(shard.paths) for shard in todo)
        write = partial(write_shard, plan.folder, recipe)
        for shard, record in zip(todo, in_parallel(write, todo, num_workers=num_workers), strict=True):
            records[shard.number] = record
            num_done += len(shard.paths)
            num_packed += len(shard.paths)
            if on_progress:
                on_progress(num_done, total)
        _write_index(plan, [records[shard.number] for shard in plan.shards], recipe=recipe)
        bytes_out += sum(record.shard.num_bytes for record in records.values())
    return Summary(
        num_pictures=total,
        num_packed=num_packed,
        num_shards=sum(len(plan.shards) for plan in plans),
        bytes_in=sum(plan.bytes_in for plan in plans),
        bytes_out=bytes_out,
        seconds=time.monotonic() - start,
    )


def _require_possible(splits: Sequence[str], num_workers: int) -> None:
    if num_workers < 1:
        raise ConfigError(f"num_workers={num_workers} is not possible; give 1 or more")
    is_name = [bool(split) and "/" not in split and not split.startswith(".") for split in splits]
    if not splits or not all(is_name) or len(set(splits)) < len(splits):
        raise ConfigError(
            f"splits={','.join(splits)!r} is not possible; give different names of folders, such as train,val"
        )


def _plan_splits(source: Path, target: Path, *, splits: Sequence[str], recipe: Recipe) -> list[SplitPlan]:
    """Look at all splits, then claim a folder for each; labels of the later splits are those of the first."""
    plans, classes = [], None
    for split in splits:
        index = read_index(source, split, classes=classes)
        classes = index.classes
        sizes_N, fingerprint = _survey(index)
        shards = [
            ShardPlan(number, p.start, tuple(map(index.full_path, p)), tuple(index.labels_N[p.start : p.stop].tolist()))
            for number, p in enumerate(cut_into_shards(sizes_N, shard_bytes=recipe.shard_bytes))
        ]
        plans.append((SplitPlan(target / split, index, shards, sum(sizes_N)), fingerprint))
    for plan, fingerprint in plans:
        _claim(plan.folder, {"version": FORMAT_VERSION, **recipe.made(), "source": fingerprint})
    return [plan for plan, _ in plans]


def _survey(index: PictureIndex) -> tuple[list[int], str]:
    """Bytes of each picture, and a hash that changes when one comes, goes, grows or is written anew."""
    chunks = [range(first, min(first + 1000, len(index))) for first in range(0, len(index), 1000)]

    def stats(chunk: range) -> list[tuple[int, int]]:
        try:
            found = [os.stat(index.full_path(position)) for position in chunk]
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror}); was it moved?") from error
        return [(stat.st_size, stat.st_mtime_ns) for stat in found]

    with ThreadPoolExecutor(16) as threads:  # on a network file system each answer takes its time
        known = [stat for part in threads.map(stats, chunks) for stat in part]
    digest = hashlib.sha256()
    for path, (size, time_ns) in zip(index.paths, known, strict=True):
        digest.update(f"{path}\0{size}\0{time_ns}\n".encode("utf-8", "surrogateescape"))
    return [size for size, _ in known], digest.hexdigest()


def _claim(folder: Path, settings: dict[str, object]) -> None:
    """Note in folder what is packed into it, and sweep up after a call that was killed. Raises: DataError."""
    path = folder / SETTINGS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".*{UNFINISHED}"):
            left.unlink(missing_ok=True)
        found = json.loads(path.read_text()) if path.exists() else None
        is_empty = not any(folder.iterdir())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read or made ({error}); {_NEW}") from error
    if found is None and not is_empty:
        raise DataError(f"{folder}: holds something else than shards of `bigbatch data pack`; name another DST")
    if found is None:
        with replacing(path) as file:
            file.write((json.dumps(settings, indent=1) + "\n").encode())
    elif found != settings:
        was = found if isinstance(found, dict) else {}
        apart = [key for key in settings if was.get(key) != settings[key]]
        changes = ", ".join(f"{key} {was.get(key)} -> {settings[key]}" for key in apart if key != "source")
        what = f"with other settings ({changes})" if changes else "from other pictures"
        raise DataError(f"{folder}: was packed {what}; {_NEW}")


def _finished_shards(plan: SplitPlan) -> dict[int, Record]:
    """By number, the shards of earlier calls that are whole: those of the index and those not in one yet."""
    records = _indexed_shards(plan.folder)
    for path in plan.folder.glob(".shard-*.json"):
        try:
            found = json.loads(path.read_text())
            records[int(path.stem.split("-")[1])] = Record(Shard(**found["shard"]), found["rows"])
        except (OSError, ValueError, TypeError, KeyError):
            continue  # it is packed again
    wanted = {shard.number: shard for shard in plan.shards}
    return {
        number: record
        for number, record in records.items()
        if number in wanted
        and len(record.rows) == len(wanted[number].paths)
        and _size_or_none(plan.folder / wanted[number].name) == record.shard.num_bytes
    }


def _indexed_shards(folder: Path) -> dict[int, Record]:
    try:
        facts, entries_N = read_entries(folder)
    except DataError:
        return {}  # not finished, or to be made anew
    rows_N4 = np.stack([entries_N[name] for name in ("offset", "length", "height", "width")], axis=1)
    return {n: Record(shard, rows_N4[entries_N["shard"] == n].tolist()) for n, shard in enumerate(facts.shards)}


def _size_or_none(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _write_index(plan: SplitPlan, records: list[Record], *, recipe: Recipe) -> None:
    """Write index.npy, then index.json, with which the split is complete; nothing where both are right already."""
    shards = tuple(record.shard for record in records)
    facts = Facts(FORMAT_VERSION, plan.index.classes, len(plan.index), shards, recipe.made())
    entries_N = np.zeros(len(plan.index), ENTRY)
    entries_N["shard"] = np.repeat(np.arange(len(records)), [len(record.rows) for record in records])
    entries_N["label"] = plan.index.labels_N
    rows_N4 = np.concatenate([np.array(record.rows, np.int64) for record in records])
    for column, name in enumerate(("offset", "length", "height", "width")):
        entries_N[name] = rows_N4[:, column]
    if not _has_index(plan.folder, facts, entries_N):
        with replacing(plan.folder / ENTRIES) as file:
            np.save(file, entries_N, allow_pickle=False)
        with replacing(plan.folder / FACTS) as file:
            file.write(facts.to_json().encode())
    for path in plan.folder.glob(".shard-*.json"):
        path.unlink(missing_ok=True)
    read_packed(plan.folder)


def _has_index(folder: Path, facts: Facts, entries_N: np.ndarray) -> bool:
    try:
        found_facts, found_N = read_entries(folder)
    except DataError:
        return False
    return found_facts == facts and np.array_equal(found_N, entries_N)
