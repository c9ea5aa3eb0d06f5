"""Reading images from a slow storage: each read sleeps before it reads a file from the page cache.

    python -m benchmarks.input.slow_reads --out benchmarks/results/input-slow-reads.json

The reader chooses its number of threads, and reads for --seconds before it is measured. Its limit is bare threads that
read the same files and parse their headers, as many as its target needs. The order of the cases is drawn.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.record import at_least, conditions, ratios, run, show, spread, write_record
from bigbatch.files import read_plain
from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.input.base import LoaderSetup, Request
from bigbatch.trainer.input.formats import encoded_size
from bigbatch.trainer.input.order import read_index
from bigbatch.trainer.input.reading import IMAGES_PER_SECOND, EncodedReader

NUM_IMAGES = 400
SIDES = (64, 340)
"""Pixels of JPEGs of noise: of 4 kB, and of about ImageNet's mean of 110 kB."""


class SlowSplit:
    """Image files of a split behind a storage with a latency."""

    def __init__(self, root: Path, *, seconds: float) -> None:
        self._split, self._seconds = read_index(root, "train"), seconds
        self.labels_N, self.name, self.sizes = self._split.labels_N, self._split.name, self._split.sizes
        self.classes, self.close = self._split.classes, self._split.close

    def __len__(self) -> int:
        return len(self._split)

    def read(self, position: int) -> bytes:
        time.sleep(self._seconds)
        return self._split.read(position)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    facts, found = conditions(options), {}
    for side in options.sides:
        with tempfile.TemporaryDirectory() as folder:
            num_bytes = write_images(Path(folder), side=side)
            rates: dict[str, list[float]] = {}
            cases: dict[str, Callable[[], float]] = {"bare threads": partial(bare_rate, Path(folder), options)}
            for size in options.batches:
                cases[f"batches of {size}"] = partial(reader_rate, Path(folder), options, size=size)
            for number in range(options.repetitions):
                for name in random.Random(number).sample(list(cases), len(cases)):
                    rates.setdefault(name, []).append(cases[name]())
        bare = rates.pop("bare threads")
        found[f"{num_bytes / 1e3:.0f} kB"] = {
            "bare_images_per_second": spread(bare),
            **{
                name: {"images_per_second": spread(values), "share_of_bare": spread(ratios(values, bare))}
                for name, values in rates.items()
            },
        }
        for name, values in {"bare threads": bare, **rates}.items():
            print(show(f"{num_bytes / 1e3:.0f} kB, {name}", spread(values), unit="images/s"), file=sys.stderr)
    write_record(options.out, {"benchmark": "slow reads", "conditions": facts, "images": found})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--milliseconds", type=float, default=3.0, help="latency of a read (default: %(default)s)")
    add("--sides", type=at_least(8), nargs="+", default=SIDES, help="of the images, in pixels (default: %(default)s)")
    add("--batches", type=at_least(1), nargs="+", default=(64, 256), help="images per batch (default: %(default)s)")
    add("--seconds", type=float, default=3.0, help="per measurement (default: %(default)s)")
    add("--repetitions", type=at_least(1), default=5, help="(default: %(default)s)")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def write_images(root: Path, *, side: int) -> float:
    """Write JPEGs of noise in one class; return their mean number of bytes."""
    folder = root / "train/noise"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        pixels_HWC = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels_HWC).save(folder / f"{number:03}.jpg", quality=90)
    return float(np.mean([path.stat().st_size for path in folder.iterdir()]))


def bare_rate(root: Path, options: argparse.Namespace) -> float:
    """Return images per second of threads that sleep, read a file and parse its header."""
    paths, numbers = sorted((root / "train/noise").iterdir()), itertools.count()
    end = time.perf_counter() + options.seconds

    def read(_: int) -> int:
        count = 0
        while time.perf_counter() < end:
            path = paths[next(numbers) % NUM_IMAGES]
            time.sleep(options.milliseconds / 1e3)
            encoded_size(read_plain(path), path=str(path))
            count += 1
        return count

    num_threads = max(1, round(IMAGES_PER_SECOND * options.milliseconds / 1e3))
    with ThreadPoolExecutor(num_threads) as threads:
        return sum(threads.map(read, range(num_threads))) / options.seconds


def reader_rate(root: Path, options: argparse.Namespace, *, size: int) -> float:
    """Return images per second of the product's reader, if nothing else uses the process."""
    split = SlowSplit(root, seconds=options.milliseconds / 1e3)
    reader = EncodedReader(
        LoaderSetup(
            source=split,
            crop=random_resized_crop(seed=1),
            image_size=lambda epoch: 224,
            microbatch_size=size,
            device=torch.device("cpu"),
            data=DataConfig(num_threads=2),
        )
    )
    draw = np.random.default_rng(0)

    def requests() -> Iterator[Request]:
        while True:
            yield Request(0, draw.integers(0, NUM_IMAGES, size), np.ones(size, bool))

    batches, started = reader.read(requests()), time.perf_counter()
    while time.perf_counter() - started < options.seconds:
        next(batches)
    started, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < options.seconds:
        next(batches)
        count += size
    batches.close()
    reader.close()
    return count / seconds


if __name__ == "__main__":
    run(main)
