"""Images per second and core, decoded and randomly cropped to 224 x 224: our loaders beside others, in one run.

    python benchmarks/input/decode.py data/imagenet --split val --threads 2 --out benchmarks/results/input-decode.json

The process is bound to as many cores as it gets threads, or else helper threads would come for free. The contestants
take turns in every round; a turn draws some batches until the pipeline is full, times the next ones, and then lets it
run dry, so that nothing computes in the turn of another. The first round is not counted: it brings the files into the
page cache. The limit is what one thread decodes of whole pictures in memory, without crop and resize; decoding
only the box, or at a smaller scale, can go beyond it.
"""

import argparse
import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import conditions, show, spread, write_record

from bigbatch.trainer.data.augment import random_resized_crop
from bigbatch.trainer.data.dali import DaliLoader
from bigbatch.trainer.data.folder import FolderLoader, resized_box
from bigbatch.trainer.data.imagenet import PictureIndex, read_index
from bigbatch.trainer.data.loader import Loader, Request
from bigbatch.trainer.errors import ConfigError

PREFETCH_BATCHES = 2
OURS = ("our_dali", "our_folder")


@dataclass(frozen=True)
class Work:
    """What every contestant is to do."""

    index: PictureIndex
    image_size: int
    batch: int
    threads: int
    fill_batches: int
    """Drawn before the time runs."""
    batches: int
    """Timed."""

    @property
    def total_batches(self) -> int:
        """With some behind the timed ones, or the pipeline would run dry while the time still runs."""
        return self.fill_batches + self.batches + max(4, 2 * self.threads)


Turn = Callable[[int], Iterator[Any]]
"""round -> batches; closing or exhausting them leaves nothing in flight."""


def main() -> None:
    """Measure and write the record."""
    options = parse()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(1)
    index = read_index(options.root, options.split)
    work = Work(index, options.image_size, options.batch, options.threads, 2 * PREFETCH_BATCHES, options.batches)
    turns, left_out = make_turns(work)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    rates = measure(turns, work, repetitions=options.repetitions)
    results = {name: spread(values) for name, values in rates.items()}
    ratios = {
        f"{ours} / {other}": spread([a / b for a, b in zip(rates[ours], values, strict=True)])
        for ours in OURS
        if ours in rates
        for other, values in rates.items()
        if other != ours
    }
    for name, values in results.items():
        print(show(name, values, unit="images/s/core"), file=sys.stderr)
    for name, values in ratios.items():
        print(show(name, values, unit=""), file=sys.stderr)
    facts = conditions(options) | {"pictures": len(index.paths), "left_out": left_out}
    record = {"benchmark": "decode", "conditions": facts}
    write_record(record | {"images_per_second_per_core": results, "ratios": ratios}, options.out)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder with <split>/<class>/<picture>")
    parser.add_argument("--split", default="train")
    parser.add_argument("--image-size", type=int, default=224, help="pixels (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads or workers, and cores (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="pictures (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=10, help="timed in one turn (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=10, help="rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    if options.threads > len(os.sched_getaffinity(0)):
        parser.error(f"--threads {options.threads}: this process may use {len(os.sched_getaffinity(0))} cores")
    return options


def make_turns(work: Work) -> tuple[dict[str, Turn], dict[str, str]]:
    """Who takes part, and who cannot and why."""
    makers: dict[str, Callable[[Work], Turn]] = {
        "our_dali": our_dali,
        "our_folder": our_folder,
        "bare_dali": bare_dali,
        "torchvision": torchvision_recipe,
        "simplejpeg": simplejpeg_threads,
        "limit_pillow_whole_picture": bare_decoder,
    }
    turns, left_out = {}, {}
    for name, make in makers.items():
        try:
            turns[name] = make(work)
        except (ImportError, ConfigError) as error:
            left_out[name] = str(error)
    return turns, left_out


def measure(turns: dict[str, Turn], work: Work, *, repetitions: int) -> dict[str, list[float]]:
    """Images per second and core of every round, each round in another order."""
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(repetitions + 1):
        for name in random.Random(number).sample(list(turns), len(turns)):
            seconds = seconds_of(turns[name](number), work)
            # the limit has one thread, whatever the others get
            cores = 1 if name.startswith("limit") else work.threads
            if number:
                rates[name].append(work.batches * work.batch / seconds / cores)
    return rates


def seconds_of(batches: Iterator[Any], work: Work) -> float:
    """From one full pipeline to the next: what is in flight at the start and at the end weighs the same."""
    for _ in range(work.fill_batches):
        next(batches)
    start = time.perf_counter()
    for _ in range(work.batches):
        next(batches)
    seconds = time.perf_counter() - start
    for _ in batches:
        pass
    return seconds


def random_positions(work: Work, number: int) -> Iterator[np.ndarray]:
    """Pictures repeat in a small folder, with another box each time."""
    generator = np.random.default_rng(number)
    for _ in range(work.total_batches):
        yield generator.integers(len(work.index.paths), size=work.batch)


def our_dali(work: Work) -> Turn:
    """DaliLoader on the CPU."""
    return _ours(work, DaliLoader(**_our_settings(work), device_id=None))


def our_folder(work: Work) -> Turn:
    """FolderLoader."""
    return _ours(work, FolderLoader(**_our_settings(work)))


def _our_settings(work: Work) -> dict[str, Any]:
    return {
        "index": work.index,
        "crop": random_resized_crop(seed=0),
        "image_size": work.image_size,
        "microbatch_size": work.batch,
        "num_threads": work.threads,
        "prefetch_batches": PREFETCH_BATCHES,
    }


def _ours(work: Work, loader: Loader) -> Turn:
    def turn(number: int) -> Iterator[Any]:
        valid_B = np.ones(work.batch, bool)
        return loader.load(Request(number, positions_B, valid_B) for positions_B in random_positions(work, number))

    return turn


def bare_dali(work: Work) -> Turn:
    """What DALI's own documentation does, without labels to torch: its reader, its random crop."""
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(
        batch_size=work.batch,
        num_threads=work.threads,
        device_id=None,
        prefetch_queue_depth=PREFETCH_BATCHES,
        exec_dynamic=True,
    )
    with pipeline:
        files, labels = fn.readers.file(file_root=work.index.root, random_shuffle=True, name="reader")
        pictures = fn.decoders.image_random_crop(files, output_type=types.RGB, random_area=[0.08, 1.0])
        pictures = fn.resize(pictures, size=[work.image_size] * 2, interp_type=types.INTERP_TRIANGULAR)
        pipeline.set_outputs(fn.flip(pictures, horizontal=fn.random.coin_flip()), labels)
    pipeline.build()

    def turn(number: int) -> Iterator[Any]:
        start = time.perf_counter()
        for _ in range(work.total_batches):
            yield pipeline.run()
        # its reader never ends and works ahead: wait until that many batches must be ready
        time.sleep(2 * PREFETCH_BATCHES * (time.perf_counter() - start) / work.total_batches)

    return turn


def torchvision_recipe(work: Work) -> Turn:
    """The reference recipe: ImageFolder, Pillow, worker processes."""
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [
        transforms.RandomResizedCrop(work.image_size),
        transforms.RandomHorizontalFlip(),
        transforms.PILToTensor(),
    ]
    pictures = ImageFolder(work.index.root, transforms.Compose(steps))
    batches = DataLoader(
        pictures,
        batch_size=work.batch,
        sampler=RandomSampler(pictures, replacement=True, num_samples=work.total_batches * work.batch),
        num_workers=work.threads,
        persistent_workers=True,
        # to fork beside DALI's threads is unsafe
        multiprocessing_context="spawn",
    )
    return lambda number: iter(batches)


def simplejpeg_threads(work: Work) -> Turn:
    """libjpeg-turbo through simplejpeg at the smallest scale that leaves the box large enough, resized by Pillow."""
    import simplejpeg

    crop, size = random_resized_crop(seed=0), work.image_size
    pool = ThreadPoolExecutor(work.threads)

    def load(position: int, number: int) -> np.ndarray:
        data = work.index.read(position)
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        boxes_B4, flips_B = crop(number, np.array([position]), np.array([[height, width]]))
        need = min(1.0, max(size / boxes_B4[0, 2], size / boxes_B4[0, 3]))
        pixels_HWC = simplejpeg.decode_jpeg(data, "RGB", min_height=int(height * need), min_width=int(width * need))
        # a scaled side is rounded up, so the box stays inside
        box = (boxes_B4[0] * (pixels_HWC.shape[0] / height)).astype(int).clip(0)
        box[2:] = box[2:].clip(1)
        return np.asarray(resized_box(Image.fromarray(pixels_HWC), box=box, flip=flips_B[0], image_size=size))

    def turn(number: int) -> Iterator[Any]:
        for positions_B in random_positions(work, number):
            yield np.stack(list(pool.map(lambda position: load(int(position), number), positions_B)))

    return turn


def bare_decoder(work: Work) -> Turn:
    """Pillow's libjpeg-turbo in one thread, bytes in memory, whole pictures: no crop, no resize."""

    def turn(number: int) -> Iterator[Any]:
        batches = list(random_positions(work, number))
        encoded = {int(position): work.index.read(int(position)) for position in np.unique(np.concatenate(batches))}
        for positions_B in batches:
            for position in positions_B.tolist():
                Image.open(io.BytesIO(encoded[position])).load()
            yield None

    return turn


if __name__ == "__main__":
    main()
