"""Pictures per second of reading alone: packed shards beside class folders, from a cold and a warm page cache.

    python -m benchmarks.input.storage data/imagenette --scratch /data/tmp --out benchmarks/results/input-storage.json

Packs the split into a temporary folder on the same file system, then reads both in whole batches in the loaders' own
way (EncodedReader), in a new random order each round, the same for both. Nothing is decoded. Before a cold turn
the kernel is told to drop the contents of the files; their names and inodes stay known to it, which favours class
folders: over a network each first open of a picture costs a round trip more. A warm turn follows the cold one of the
same layout. Caches below the kernel, such as the disk's or a virtual machine's host's, are not emptied. The first round
is not counted.
"""

import argparse
import ctypes
import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import at_least, run
from benchmarks.record import conditions, file_system, show, spread, write_record
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input.base import ImageSource, Request
from bigbatch.trainer.input.order import epoch_order, read_index
from bigbatch.trainer.input.reading import EncodedReader
from bigbatch.trainer.input.shards import read_packed

PREFETCH_BATCHES = 2
PROBED_FILES = 500
"""As many of a layout are asked how much of them is in memory."""
MOST_CACHED = 0.05
"""Share of the pages that may stay in memory in a turn that is called cold."""


@dataclass(frozen=True)
class Layout:
    """Holds the same pictures, stored in one way."""

    source: ImageSource
    files: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(os.path.getsize(path) for path in self.files)


@dataclass(frozen=True)
class Turn:
    """Holds one reading of all pictures."""

    rate: float
    """Pictures per second."""
    cached: float
    """Share of the pages that were in memory before."""


Turns = dict[str, dict[str, list[Turn]]]
"""state ("cold" or "warm") -> layout -> one per round."""


def main() -> None:
    """Pack, measure, remove the copy, write the record."""
    options = parse()
    facts = conditions(options)
    facts["file_system"] = file_system(options.root)
    with tempfile.TemporaryDirectory(prefix="bigbatch-storage-", dir=options.scratch) as scratch:
        layouts = make_layouts(options, Path(scratch))
        left_out = why_not_cold(layouts)
        for state, reason in left_out.items():
            print(f"left out: {state}: {reason}", file=sys.stderr)
        turns = measure(layouts, options, states=[each for each in ("cold", "warm") if each not in left_out])
        facts |= describe_layouts(layouts) | {"left_out": left_out}
    record = {"benchmark": "storage", "conditions": facts, **describe(turns)}
    for state, rows in record["pictures_per_second"].items():
        for name, values in rows.items():
            print(show(f"{state} {name}", values, unit="pictures/s"), file=sys.stderr)
        print(show(f"{state} packed / class_folders", record["ratios"][state], unit=""), file=sys.stderr)
    write_record(options.out, record)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, at_least(1)
    add("root", type=Path, help="folder with <split>/<class>/<picture>, your own files")
    add("--split", default="train")
    add("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="for the copy (default: %(default)s)")
    add("--shard-mb", type=count, default=PackRecipe().shard_bytes // 10**6, help="in 1e6 bytes (default: %(default)s)")
    add("--threads", type=count, default=2, help="that read, as in the loaders (default: %(default)s)")
    add("--batch", type=count, default=256, help="pictures (default: %(default)s)")
    add("--repetitions", type=at_least(5), default=10, help="rounds (default: %(default)s)")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    options = parser.parse_args(argv)
    for path in (options.root / options.split, options.scratch):
        if not path.is_dir():
            parser.error(f"{path}: no such folder")
    if os.stat(options.root / options.split).st_dev != os.stat(options.scratch).st_dev:
        parser.error(f"--scratch {options.scratch}: lies on another file system than {options.root}; name one there")
    return options


def make_layouts(options: argparse.Namespace, scratch: Path) -> dict[str, Layout]:
    """Make the class folders, and a packed copy of them in scratch. Raises: DataError."""
    index = read_index(options.root, options.split)
    recipe = PackRecipe(shard_bytes=options.shard_mb * 10**6)
    cores = len(os.sched_getaffinity(0))
    print(pack(options.root, scratch, recipe=recipe, splits=[options.split], num_workers=cores), file=sys.stderr)
    os.sync()  # a page that is not on disk yet cannot be dropped
    shards = sorted(str(path) for path in (scratch / options.split).glob("shard-*.tar"))
    return {
        "class_folders": Layout(index, tuple(map(index.full_path, range(len(index))))),
        "packed": Layout(read_packed(scratch / options.split), tuple(shards)),
    }


def why_not_cold(layouts: dict[str, Layout]) -> dict[str, str]:
    """Return {"cold": reason} where the kernel does not drop the files from memory, or does not tell; else {}."""
    for name, layout in layouts.items():
        evict(layout.files)
        cached = cached_share(layout.files)
        if cached > MOST_CACHED:
            advice = "a file system in memory, another process that has them mapped, or files of another user"
            return {"cold": f"posix_fadvise leaves {cached:.0%} of {name} in memory: {advice}"}
    return {}


def evict(paths: Sequence[str]) -> None:
    """Ask the kernel to forget the contents of files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(paths: Sequence[str]) -> float:
    """Compute the share of some files' pages that are in memory, by mincore, which itself reads nothing."""
    in_memory = total = 0
    for path in paths[:: max(1, len(paths) // PROBED_FILES)]:
        pages = pages_in_memory(path)
        in_memory += int(pages.sum())
        total += len(pages)
    return in_memory / max(1, total)


def pages_in_memory(path: str) -> np.ndarray:
    """Return one bool per page of a file. The kernel says yes to all for a file that this user may not write."""
    length = os.path.getsize(path)
    pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    if not length:
        return pages.astype(bool)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ) as view:
        content = np.frombuffer(view, np.uint8)
        code = _mincore(content.ctypes.data, length, pages.ctypes.data)
        del content  # or the view could not be closed
    if code:
        raise OSError(ctypes.get_errno(), "mincore failed", path)
    return (pages & 1).astype(bool)


def _mincore(address: int, length: int, pages: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_void_p(pages)))


def measure(layouts: dict[str, Layout], options: argparse.Namespace, *, states: Sequence[str]) -> Turns:
    """Measure every layout in every state once a round, the layouts each time in another order."""
    turns: Turns = {state: {name: [] for name in layouts} for state in states}
    for number in range(options.repetitions + 1):
        for name in random.Random(number).sample(list(layouts), len(layouts)):
            for state in states:
                if state == "cold":
                    evict(layouts[name].files)
                turn = read_all(layouts[name], number=number, threads=options.threads, batch=options.batch)
                if number:
                    turns[state][name].append(turn)
    return turns


def read_all(layout: Layout, *, number: int, threads: int, batch: int) -> Turn:
    """Read as many pictures as make whole batches, in the order of epoch number."""
    cached, num_samples = cached_share(layout.files), len(layout.source)
    batch = min(batch, num_samples)
    order_N = epoch_order(seed=0, epoch=number, num_samples=num_samples)
    parts = [order_N[first : first + batch] for first in range(0, num_samples - batch + 1, batch)]
    requests = [Request(number, indices_B, np.ones(batch, bool)) for indices_B in parts]
    reader = EncodedReader(
        layout.source,
        _no_crop,
        image_size=lambda epoch: 1,
        microbatch_size=batch,
        num_threads=threads,
        prefetch_batches=PREFETCH_BATCHES,
        patience_seconds=1,
    )
    start = time.perf_counter()
    num_read = sum(len(encoded.images) for encoded in reader.read(requests))
    seconds = time.perf_counter() - start
    reader.close()
    return Turn(num_read / seconds, cached)


def _no_crop(epoch: int, indices_B: np.ndarray, sizes_B2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return boxes that nobody uses: the draws are not part of reading."""
    return np.zeros((len(indices_B), 4), np.int32), np.zeros(len(indices_B), bool)


def describe_layouts(layouts: dict[str, Layout]) -> dict[str, Any]:
    """Describe sizes for the conditions."""
    return {
        "pictures": len(layouts["packed"].source),
        "files": {name: len(layout.files) for name, layout in layouts.items()},
        "bytes": {name: layout.num_bytes for name, layout in layouts.items()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def describe(turns: Turns) -> dict[str, Any]:
    """Describe the spreads, that of the ratios within the rounds, and what was in memory before the turns."""
    ratios = {}
    for state, rows in turns.items():
        pairs = zip(rows["packed"], rows["class_folders"], strict=True)
        ratios[state] = spread([packed.rate / folders.rate for packed, folders in pairs])
    return {
        "pictures_per_second": _each(turns, "rate"),
        "ratios": ratios,
        "cached_share_before": _each(turns, "cached"),
    }


def _each(turns: Turns, field: str) -> dict[str, dict[str, dict[str, float]]]:
    return {
        state: {name: spread([getattr(turn, field) for turn in each]) for name, each in rows.items()}
        for state, rows in turns.items()
    }


if __name__ == "__main__":
    run(main)
