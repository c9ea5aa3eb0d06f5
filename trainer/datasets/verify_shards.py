"""Verify packed shards: read every byte again, and compare every index entry with its tar member."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigbatch.errors import DataError
from bigbatch.files import open_plain, sha256_of
from bigbatch.trainer.datasets.processes import Advance, in_parallel, show_nothing
from bigbatch.trainer.input.data_root import is_packed
from bigbatch.trainer.input.formats import encoded_size
from bigbatch.trainer.input.shards import ENTRIES, REPACK, Shard, read_packed
from bigbatch.trainer.input.tar_headers import Window, read_members

COLUMNS = ("offset", "length", "height", "width", "label")
_ANY_PIXELS = 178_000_000
"""Largest legal data.max_megapixels, in pixels."""


@dataclass(frozen=True)
class ShardRecord:
    """A shard, and for each image (number in the split, *COLUMNS)."""

    shard: Shard
    rows: Sequence[tuple[int, ...]]


def verify(root: Path, *, num_workers: int = 1, on_progress: Advance = show_nothing) -> int:
    """Read every byte of all packed splits of root again, and verify them; return the number of images.

    on_progress gets (shards done, shards in all). Raises: DataError naming what is missing, cut, edited or
    wrong; ConfigError for an impossible setting.
    """
    entries = root.iterdir() if root.is_dir() else ()
    folders = sorted(folder for folder in entries if folder.is_dir() and is_packed(folder))
    if not folders:
        raise DataError(f"{root}: holds no packed split; name the DST of `bigbatch data pack`")
    stated = [shard for folder in folders for shard in _stated_shards(folder)]
    for num_done, _ in enumerate(in_parallel(_verify_shard, stated, num_workers=num_workers), 1):
        on_progress(num_done, len(stated))
    return sum(len(record.rows) for _, record in stated)


def _stated_shards(folder: Path) -> list[tuple[Path, ShardRecord]]:
    """Return the shards as the index states them. Raises: DataError, as when a run opens the split."""
    index, stated = read_packed(folder), []
    for number, shard in enumerate(index.facts.shards):
        positions_M = np.flatnonzero(index.entries_N["shard"] == number)
        columns = (positions_M, *(index.entries_N[name][positions_M] for name in COLUMNS))
        stated.append((folder / shard.name, ShardRecord(shard, list(zip(*(c.tolist() for c in columns), strict=True)))))
    return stated


def _verify_shard(stated: tuple[Path, ShardRecord]) -> None:
    path, record = stated
    found = read_shard(path, expected=record.shard)
    if len(found.rows) != len(record.rows):
        problem = f"{len(found.rows)} images, {ENTRIES} states {len(record.rows)}"
        raise DataError(f"{path}: the shard holds {problem}; delete the shard and {REPACK}")
    for row, expected in zip(found.rows, record.rows, strict=True):
        if row != expected:
            problem = f"the shard holds {row} as (number, {', '.join(COLUMNS)}), {ENTRIES} states {expected}"
            raise DataError(f"{path}: image {row[0]}: {problem}; delete the shard and {REPACK}")


def read_shard(path: Path, *, expected: Shard | None = None) -> ShardRecord:
    """Return the record that the index must have of a shard.

    Raises: DataError if `bigbatch data pack` did not write the shard, it differs from expected, or cannot be read.
    """
    try:
        shard = Shard(path.name, path.stat().st_size, sha256_of(path))
        rows = [] if expected not in (None, shard) else list(_read_rows(path, shard.num_bytes))
    except (OSError, ValueError, DataError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it and {REPACK}") from error
    if expected not in (None, shard):
        raise DataError(f"{path}: its bytes are not those that were packed; delete it and {REPACK}")
    return ShardRecord(shard, rows)


def _read_rows(path: Path, num_bytes: int) -> Iterator[tuple[int, ...]]:
    with open_plain(path) as file:
        window = Window(lambda length, offset: os.pread(file.fileno(), length, offset))
        members = read_members(window, path=path.name, num_bytes=num_bytes, any_names=True)
        for image, label in zip(members, members, strict=True):  # each image is followed by its label
            data, text = (window.at(member.offset, member.num_bytes) for member in (image, label))
            size = encoded_size(data, path=image.name, max_pixels=_ANY_PIXELS)
            yield int(image.name[:8]), image.offset, image.num_bytes, *size, int(text)
