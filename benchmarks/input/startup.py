"""Seconds until a data set of ImageNet's size is listed and has given its first batch: class folders beside shards.

    python -m benchmarks.input.startup --out benchmarks/results/input-startup.json
    python -m benchmarks.input.startup --num 100000

Both are made up: 1,000 folders with one JPEG each, under as many names as there are pictures (hard links), and an index
whose shards hold one JPEG each, and holes. Every repetition is a fresh process, the two in turn; the time runs from
the first look at the folder to a batch of 256 pictures at 224 x 224, of which listing is one part; Python and torch are
imported before. The files were written just before, so folders and index are in the kernel's cache: a cold file system,
or one over a network, takes longer.
"""

import argparse
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from benchmarks.arguments import at_least, run

if TYPE_CHECKING:
    from bigbatch.trainer.input.base import ImageSource

NUM_CLASSES = 1000
IMAGENET_IMAGES = 1_281_167
IMAGE_BYTES = 110_000
"""As ImageNet's on average, for the size of the shards."""
HEIGHT, WIDTH = 375, 500
BATCH, IMAGE_SIZE = 256, 224
LAYOUTS = {"class_folders": "read_index", "packed": "open_split"}
"""Folder of the layout: what opens it."""


def main() -> None:
    """Build the layouts, measure, remove them, write the record."""
    options = parse()
    if options.measure:
        opener, root = options.measure
        print(json.dumps(measure_here(opener, Path(root))))
        return
    from benchmarks.record import conditions, file_system, show, spread, write_record

    facts = conditions(options)
    with tempfile.TemporaryDirectory(prefix="bigbatch-startup-", dir=options.scratch) as folder:
        root = Path(folder)
        facts["file_system"] = file_system(root)
        start = time.perf_counter()
        build_class_folders(root / "class_folders", num_images=options.num)
        facts["shards"] = build_packed(root / "packed", num_images=options.num)
        print(f"{options.num:,} pictures made twice in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        runs = measure(root, repetitions=options.repetitions)
    assert all(run["pictures"] == options.num for each in runs.values() for run in each)
    results = {
        opener: {name: spread([run[name] for run in each]) for name in each[0] if name != "pictures"}
        for opener, each in runs.items()
    }
    for opener, figures in results.items():
        for name, values in figures.items():
            print(show(f"{opener} {name}", values, unit=""), file=sys.stderr)
    write_record(options.out, {"benchmark": "startup", "conditions": facts, "results": results})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--num", type=at_least(NUM_CLASSES), default=IMAGENET_IMAGES, help="pictures (default: %(default)s)")
    add("--repetitions", type=at_least(1), default=10, help="fresh processes of each (default: %(default)s)")
    add("--scratch", type=Path, help="folder for what is made (default: the system's temporary folder)")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    add("--measure", nargs=2, help=argparse.SUPPRESS)  # what a fresh process is told
    return parser.parse_args(argv)


def build_class_folders(root: Path, *, num_images: int) -> None:
    """Fill root/train/<wnid>/<wnid>_<number>.JPEG, names as long as ImageNet's, with one file and its hard links."""
    per_class, rest = divmod(num_images, NUM_CLASSES)
    for label, wnid in enumerate(_wnids()):
        folder = root / "train" / wnid
        folder.mkdir(parents=True)
        names = [f"{wnid}_{number * 7919 % 100_000}.JPEG" for number in range(per_class + (label < rest))]
        (folder / names[0]).write_bytes(an_image())
        for name in names[1:]:
            os.link(folder / names[0], folder / name)


@cache
def an_image() -> bytes:
    """Make a JPEG of HEIGHT x WIDTH."""
    noise_HWC = np.random.default_rng(0).integers(0, 256, (HEIGHT // 4, WIDTH // 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise_HWC).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def build_packed(root: Path, *, num_images: int) -> int:
    """Fill root/train as `bigbatch data pack` does, all pictures of a shard its first; return the number of shards."""
    from bigbatch.trainer.datasets.pack import PackRecipe, padded
    from bigbatch.trainer.input.shards import BLOCK_BYTES, ENTRIES, ENTRY, FACTS, FORMAT_VERSION, Shard, SplitIndex

    folder = root / "train"
    folder.mkdir(parents=True)
    member_bytes = BLOCK_BYTES + padded(IMAGE_BYTES) + 2 * BLOCK_BYTES  # header, picture, label with its header
    per_shard = PackRecipe().shard_bytes // member_bytes
    entries_N, numbers_N = np.zeros(num_images, ENTRY), np.arange(num_images)
    entries_N["shard"], entries_N["offset"] = numbers_N // per_shard, BLOCK_BYTES
    entries_N["length"], entries_N["height"], entries_N["width"] = len(an_image()), HEIGHT, WIDTH
    entries_N["label"] = numbers_N * NUM_CLASSES // num_images
    np.save(folder / ENTRIES, entries_N)
    num_shards = -(-num_images // per_shard)
    shards = tuple(Shard(f"shard-{n:06d}.tar", per_shard * member_bytes, "0" * 64) for n in range(num_shards))
    for shard in shards:
        with open(folder / shard.name, "wb") as file:
            file.seek(BLOCK_BYTES)
            file.write(an_image())
            file.truncate(shard.num_bytes)
    facts = SplitIndex(
        version=FORMAT_VERSION,
        classes=_wnids(),
        num_images=num_images,
        entries_sha256=hashlib.sha256((folder / ENTRIES).read_bytes()).hexdigest(),
        shards=shards,
        made=PackRecipe().made(),
    )
    (folder / FACTS).write_text(facts.to_json())
    return num_shards


def _wnids() -> tuple[str, ...]:
    return tuple(f"n{label:08d}" for label in range(NUM_CLASSES))


def measure(root: Path, *, repetitions: int) -> dict[str, list[dict[str, Any]]]:
    """Measure what each opener costs, the openers in turn, each time in another order."""
    runs: dict[str, list[dict[str, Any]]] = {opener: [] for opener in LAYOUTS.values()}
    for number in range(repetitions):
        for layout in random.Random(number).sample(list(LAYOUTS), len(LAYOUTS)):
            runs[LAYOUTS[layout]].append(measure_fresh(LAYOUTS[layout], root / layout))
    return runs


def measure_fresh(opener: str, root: Path) -> dict[str, Any]:
    """Measure one repetition in a process of its own, whose errors come through."""
    command = [sys.executable, "-m", "benchmarks.input.startup", "--measure", opener, str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"startup.py: the process that was to measure {opener} ended with {done.returncode}, see above")
    return dict(json.loads(done.stdout))


def measure_here(opener: str, root: Path) -> dict[str, Any]:
    """Measure seconds to the list and to the first batch; peak memory after the list and how much it grew."""
    from bigbatch.trainer.input.order import read_index
    from bigbatch.trainer.input.shards import open_split

    with warmed_loader() as first_batch:
        before = peak_memory_mb()
        start = time.perf_counter()
        images = read_index(root, "train") if opener == "read_index" else open_split(root, "train")
        listed = time.perf_counter() - start
        after = peak_memory_mb()
        first_batch(images)
        seconds = time.perf_counter() - start
    return {
        "pictures": len(images),
        "list_seconds": listed,
        "first_batch_seconds": seconds,
        "peak_memory_mb": after,
        "added_peak_memory_mb": after - before,
    }


@contextmanager
def warmed_loader() -> "Iterator[Callable[[ImageSource], None]]":
    """Make what draws the first batch of an epoch from a source, with everything imported."""
    from bigbatch.trainer.augment.crops import random_resized_crop
    from bigbatch.trainer.input.loaders.by_name import make_image_loader
    from bigbatch.trainer.input.order import train_requests

    loaders = []

    def first_batch(source: "ImageSource") -> None:
        loader = make_image_loader(
            "torchvision",
            source,
            crop=random_resized_crop(seed=0),
            image_size=IMAGE_SIZE,
            microbatch_size=BATCH,
            num_threads=os.cpu_count() or 1,
            prefetch_batches=1,
        )
        loaders.append(loader)
        requests = train_requests(
            seed=0,
            num_samples=len(source),
            global_batch_size=BATCH,
            microbatch_size=BATCH,
            rank=0,
            world_size=1,
            start_step=0,
            end_step=1,
        )
        assert len(next(iter(loader.load(requests))).labels_B) == BATCH

    yield first_batch
    for loader in loaders:
        loader.close()


def peak_memory_mb() -> float:
    """Return the largest resident memory so far in 1e6 bytes; getrusage would count the parent's before exec, too."""
    match = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match, "needs Linux"
    return int(match[1]) * 1024 / 1e6


if __name__ == "__main__":
    run(main)
