"""From class folders to packed shards (see shards.py): in parallel, resumable, the same input gives the same bytes."""

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bigbatch.errors import ConfigError, DataError
from bigbatch.files import parse_json
from bigbatch.trainer.datasets.processes import in_parallel
from bigbatch.trainer.datasets.shard_writer import (
    PackRecipe,
    ShardPlan,
    ShardRecord,
    new_shard_file,
    padded,
    record_name,
    sweep_unfinished,
    write_shard,
)
from bigbatch.trainer.input.listed import read_images
from bigbatch.trainer.input.order import ImageIndex, describe_left_out
from bigbatch.trainer.input.shards import (
    BLOCK_BYTES,
    ENTRIES,
    ENTRY,
    FACTS,
    FORMAT_VERSION,
    SETTINGS,
    Shard,
    SplitIndex,
    read_entries,
    read_packed,
    shard_name,
)

_LABEL_BYTES = 2 * BLOCK_BYTES
_NEW = "delete its folder to pack anew, or name another DST"


@dataclass(frozen=True)
class SplitPlan:
    """Follows one split on its way from index to folder."""

    folder: Path
    index: ImageIndex
    shards: list[ShardPlan]
    bytes_in: int


@dataclass(frozen=True)
class PackSummary:
    """Says what a call of pack did; num_packed leaves out what an earlier call had packed already."""

    num_images: int
    num_packed: int
    num_shards: int
    bytes_in: int
    bytes_out: int
    seconds: float

    def __str__(self) -> str:
        if not self.num_packed:
            return f"{self.num_images} pictures in {self.num_shards} shards, complete already"
        earlier = self.num_images - self.num_packed
        return (
            f"{self.num_images} pictures in {self.num_shards} shards"
            f"{f' ({earlier} pictures by an earlier call)' if earlier else ''}, "
            f"{_size(self.bytes_in)} in, {_size(self.bytes_out)} out, "
            f"{self.seconds:.1f} s, {self.num_packed / self.seconds:.0f} pictures/s"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.4g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.4g} MB"


def cut_into_shards(sizes_N: Sequence[int], *, shard_bytes: int) -> list[range]:
    """Return the positions of each shard, in order: as many pictures as fit into shard_bytes of tar, at least one."""
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
    recipe: PackRecipe,
    splits: Sequence[str] = ("train", "val"),
    num_workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
    on_left_out: Callable[[str], None] | None = None,
) -> PackSummary:
    """Write target/<split>/ from source/<split>/<class>/<picture>, or from the list source.

    It finishes what an earlier call left. num_workers processes share the work (1: none are started). on_progress gets
    (pictures done, pictures in all), on_left_out before all else a line that counts the files which are not packed and
    look like images. Every picture is decoded once. Raises: ConfigError for an impossible setting;
    DataError naming a bad picture, a target that holds something else, or a disk that cannot be written.
    """
    _require_possible(splits, num_workers)
    start, plans = time.monotonic(), _plan_splits(source, target, splits=splits, recipe=recipe)
    total = sum(len(plan.index) for plan in plans)
    left_out = describe_left_out(source, *(plan.index for plan in plans))
    if left_out and on_left_out:
        on_left_out(left_out)
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
    return PackSummary(
        num_images=total,
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


def _plan_splits(source: Path, target: Path, *, splits: Sequence[str], recipe: PackRecipe) -> list[SplitPlan]:
    """Look at all splits, then claim a folder for each; labels of the later splits are those of the first."""
    plans, classes = [], None
    for split in splits:
        index = read_images(source, split, classes=classes)
        classes = index.classes
        stamps_N = _survey(index)
        sizes_N = [size for size, _ in stamps_N]
        cuts = cut_into_shards(sizes_N, shard_bytes=recipe.shard_bytes)
        shards = [
            ShardPlan(number, p.start, tuple(map(index.full_path, p)), tuple(index.labels_N[p.start : p.stop].tolist()))
            for number, p in enumerate(cuts)
        ]
        sources = [_fingerprint(index, stamps_N, positions) for positions in cuts]
        plans.append((SplitPlan(target / split, index, shards, sum(sizes_N)), sources))
    # after all splits were read: one that is bad leaves no folder behind
    for plan, sources in plans:
        _claim(plan.folder, {"version": FORMAT_VERSION, **recipe.made(), "sources": sources})
    return [plan for plan, _ in plans]


def _survey(index: ImageIndex) -> list[tuple[int, int]]:
    """Return the bytes of each picture, and when it was written (ns)."""
    chunks = [range(first, min(first + 1000, len(index))) for first in range(0, len(index), 1000)]

    def stats(chunk: range) -> list[tuple[int, int]]:
        try:
            found = [os.stat(index.full_path(position)) for position in chunk]
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror}); was it moved?") from error
        return [(stat.st_size, stat.st_mtime_ns) for stat in found]

    with ThreadPoolExecutor(16) as threads:  # on a network file system each answer takes its time
        return [stat for part in threads.map(stats, chunks) for stat in part]


def _fingerprint(index: ImageIndex, stamps_N: Sequence[tuple[int, int]], positions: range) -> str:
    """Return what changes when a shard's picture comes, goes, grows, is written anew or gets another label."""
    digest = hashlib.sha256(f"{positions.start}\n".encode())
    for position in positions:
        size, time_ns = stamps_N[position]
        stamp = f"{index.paths[position]}\0{index.labels_N[position]}\0{size}\0{time_ns}\n"
        digest.update(stamp.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Note in folder what is packed into it, and sweep up what earlier calls left that is of no use now.

    Raises: DataError.
    """
    path = folder / SETTINGS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep_unfinished(folder)
        found = parse_json(path.read_text()) if path.exists() else None
        if found is None and any(folder.iterdir()):
            raise DataError(f"{folder}: holds something else than shards of `bigbatch data pack`; name another DST")
        if found is not None and found != settings:
            was = found if isinstance(found, dict) else {}
            _refuse_another(folder, was, settings)
            _forget(folder, was=was.get("sources"), sources=settings["sources"])
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read or made ({error}); {_NEW}") from error
    if found != settings:
        with new_shard_file(path) as file:
            file.write((json.dumps(settings, indent=1) + "\n").encode())


def _refuse_another(folder: Path, was: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise DataError unless only pictures changed, of a split that is not packed to its end yet."""
    apart = [key for key in settings if key != "sources" and was.get(key) != settings[key]]
    if apart:
        changes = ", ".join(f"{key} {was.get(key)} -> {settings[key]}" for key in apart)
        raise DataError(f"{folder}: was packed with other settings ({changes}); {_NEW}")
    if (folder / FACTS).exists():
        raise DataError(f"{folder}: was packed from other pictures; {_NEW}")


def _forget(folder: Path, *, was: object, sources: Sequence[str]) -> None:
    """Remove the records of shards whose pictures changed, such as a bad one replaced, and shards in excess.

    The records go before pack.json is written anew: a kill in between only loses records.
    """
    known = was if isinstance(was, list) else []
    kept = {record_name(n) for n, (old, new) in enumerate(zip(known, sources, strict=False)) if old == new}
    for path in folder.glob(".shard-*.json"):
        if path.name not in kept:
            path.unlink(missing_ok=True)
    wanted = {shard_name(n) for n in range(len(sources))}
    for path in folder.glob("shard-*.tar"):
        if path.name not in wanted:
            path.unlink(missing_ok=True)


def _finished_shards(plan: SplitPlan) -> dict[int, ShardRecord]:
    """Return, by number, the shards of earlier calls that are whole: those of the index and those not in one yet."""
    records = _indexed_shards(plan.folder)
    finished = {}
    for shard in plan.shards:
        # a record is newer than the index where a shard was packed again
        record = _read_record(plan.folder / record_name(shard.number)) or records.get(shard.number)
        if record is None or len(record.rows) != len(shard.paths):
            continue
        if _size_or_none(plan.folder / shard.name) == record.shard.num_bytes:
            finished[shard.number] = record
    return finished


def _read_record(path: Path) -> ShardRecord | None:
    """Read a record; None where there is none, or a broken one: the shard is packed again."""
    try:
        found = parse_json(path.read_text())
        return ShardRecord(Shard(**found["shard"]), np.array(found["rows"], np.int64).reshape(-1, 4).tolist())
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _indexed_shards(folder: Path) -> dict[int, ShardRecord]:
    try:
        facts, entries_N = read_entries(folder)
    except DataError:
        return {}  # not finished, or to be made anew
    rows_N4 = np.stack([entries_N[name] for name in ("offset", "length", "height", "width")], axis=1)
    return {n: ShardRecord(shard, rows_N4[entries_N["shard"] == n].tolist()) for n, shard in enumerate(facts.shards)}


def _size_or_none(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _write_index(plan: SplitPlan, records: list[ShardRecord], *, recipe: PackRecipe) -> None:
    """Write index.npy, then index.json, with which the split is complete; nothing where both are right already."""
    buffer = io.BytesIO()
    np.save(buffer, _entries(plan, records), allow_pickle=False)
    facts = SplitIndex(
        version=FORMAT_VERSION,
        classes=plan.index.classes,
        num_images=len(plan.index),
        entries_sha256=hashlib.sha256(buffer.getbuffer()).hexdigest(),
        shards=tuple(record.shard for record in records),
        made=recipe.made(),
    )
    if not _has_index(plan.folder, facts):
        # index.json comes last, with the hash of index.npy: it alone says that all is there
        with new_shard_file(plan.folder / ENTRIES) as file:
            file.write(buffer.getbuffer())
        with new_shard_file(plan.folder / FACTS) as file:
            file.write(facts.to_json().encode())
    for path in plan.folder.glob(".shard-*.json"):
        path.unlink(missing_ok=True)
    # reads what a run would read, and raises what it would raise
    read_packed(plan.folder)


def _entries(plan: SplitPlan, records: list[ShardRecord]) -> np.ndarray:
    """Return what index.npy holds."""
    entries_N = np.zeros(len(plan.index), ENTRY)
    entries_N["shard"] = np.repeat(np.arange(len(records)), [len(record.rows) for record in records])
    entries_N["label"] = plan.index.labels_N
    rows_N4 = np.concatenate([np.array(record.rows, np.int64) for record in records])
    for column, name in enumerate(("offset", "length", "height", "width")):
        entries_N[name] = rows_N4[:, column]
    return entries_N


def _has_index(folder: Path, facts: SplitIndex) -> bool:
    try:
        return read_entries(folder)[0] == facts
    except DataError:
        return False
