"""Measure images per second and core, decoded and randomly cropped to 224 x 224: our loaders beside others, in one run.

    python -m benchmarks.input.decode data/imagenet --split val --threads 2 --out benchmarks/results/input-decode.json

The process is bound to as many cores as it gets threads, or else helper threads would come for free. All contestants
draw from one subset of the images, read once before any turn, so that the files of all lie in the page cache. They
take turns in every round; a turn draws some batches until the pipeline is full, times the next ones, and then lets it
run dry, so that nothing computes in the turn of another. The first round is not counted. The limit is what one thread
decodes of whole images in memory, without crop and resize; decoding only the box, or at a smaller scale, can go
beyond it. The draws are what one call of random_resized_crop costs on one core, per image.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.input.contestants import MAKERS, OURS, Contestant, Work, make_contestants
from benchmarks.record import at_least, conditions, ratios, run, show, spread, write_record
from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.input.formats import encoded_size
from bigbatch.trainer.input.order import ImageIndex, read_index

Rates = dict[str, list[float]]
Clock = Callable[[], float]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    facts = conditions(options)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(1)
    index = subset(read_index(options.root, options.split), number=options.images)
    work = Work(
        index,
        options.image_size,
        options.batch,
        options.threads,
        options.batches,
        prefetch_batches=options.prefetch,
        device_id=options.device_id,
    )
    contestants, left_out = make_contestants(work, names=options.contestants)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    facts |= {"pinned_cores": sorted(os.sched_getaffinity(0)), "left_out": left_out, **read_all(index)}
    if options.device_id is not None:
        facts["gpu"] = torch.cuda.get_device_name(options.device_id)
    clock = time.process_time if options.cpu_time else time.perf_counter
    rates, draws = measure(contestants, repetitions=options.repetitions, clock=clock)
    record = {"benchmark": "decode", "conditions": facts, **describe(rates, draws)}
    for name, values in record["images_per_second_per_core"].items():
        print(show(name, values, unit="images/s/core"), file=sys.stderr)
    for name, values in record["ratios"].items():
        print(show(name, values, unit=""), file=sys.stderr)
    print(show("draws", record["draw_microseconds_per_image"], unit="us/image"), file=sys.stderr)
    write_record(options.out, record)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, at_least(1)
    add("root", type=Path, help="folder with <split>/<class>/<image>")
    add("--split", default="train")
    add("--images", type=count, default=2000, help="drawn from the split, for all alike (default: %(default)s)")
    add("--image-size", type=count, default=224, help="pixels (default: %(default)s)")
    add("--threads", type=count, default=1, help="threads or workers, and cores (default: %(default)s)")
    add("--batch", type=count, default=64, help="images (default: %(default)s)")
    add(
        "--prefetch",
        type=count,
        default=2,
        help="batches ahead of use (default: %(default)s)",
    )
    add("--batches", type=count, default=10, help="timed in one turn, per thread (default: %(default)s)")
    add("--repetitions", type=count, default=10, help="rounds (default: %(default)s)")
    add("--cpu-time", action="store_true", help="count CPU seconds, for a busy machine; not for torchvision's workers")
    add("--device-id", type=at_least(0), help="GPU on which both DALI pipelines decode (default: the CPU)")
    add("--contestants", nargs="+", choices=tuple(MAKERS), default=tuple(MAKERS), help="default: all that can run")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    options = parser.parse_args(argv)
    if options.threads > len(os.sched_getaffinity(0)):
        parser.error(f"--threads {options.threads}: this process may use {len(os.sched_getaffinity(0))} cores")
    if options.device_id is not None and options.device_id >= torch.cuda.device_count():
        parser.error(f"--device-id {options.device_id}: torch finds {torch.cuda.device_count()} CUDA devices")
    return options


def subset(index: ImageIndex, *, number: int) -> ImageIndex:
    """Draw the same random images in every call, in the order of the split; all if there are no more."""
    chosen = np.sort(np.random.default_rng(0).permutation(len(index))[:number])
    return replace(index, paths=[index.paths[i] for i in chosen.tolist()], labels_N=index.labels_N[chosen])


def read_all(index: ImageIndex) -> dict[str, float]:
    """Count the bytes and images to decode, and read them into the page cache."""
    num_bytes = num_pixels = 0
    for position in range(len(index)):
        data = index.read(position)
        height, width = encoded_size(data, path=index.name(position))
        num_bytes += len(data)
        num_pixels += height * width
    return {
        "images": len(index),
        "bytes": num_bytes,
        "mean_bytes": num_bytes / len(index),
        "mean_megapixels": num_pixels / len(index) / 1e6,
    }


def measure(
    contestants: dict[str, Contestant], *, repetitions: int, clock: Clock = time.perf_counter
) -> tuple[Rates, list[float]]:
    """Measure images per second and core of every round, each round in another order; microseconds of a draw."""
    rates: Rates = {name: [] for name in contestants}
    draws = []
    for number in range(repetitions + 1):
        for name in random.Random(number).sample(list(contestants), len(contestants)):
            work = contestants[name].work
            seconds = seconds_of(contestants[name].draw(number), work, clock=clock)
            if number:
                rates[name].append(work.batches * work.batch / seconds / work.threads)
        if number:
            draws.append(draw_microseconds())
    return rates, draws


def seconds_of(batches: Iterator[Any], work: Work, *, clock: Clock) -> float:
    """Time from one full pipeline to the next: as many batches are in flight at the start as at the end."""
    for _ in range(work.fill_batches):
        next(batches)
    work.synchronize()
    start = clock()
    for _ in range(work.batches):
        next(batches)
    work.synchronize()
    seconds = clock() - start
    for _ in batches:
        pass
    return seconds


def draw_microseconds() -> float:
    """Measure the cost of random_resized_crop per image."""
    batch, calls = 256, 50
    crop, indices_B = random_resized_crop(seed=0), np.arange(batch)
    sizes_B2 = np.tile(np.array([[375, 500]]), (batch, 1))
    start = time.perf_counter()
    for epoch in range(calls):
        crop(epoch, indices_B, sizes_B2)
    return (time.perf_counter() - start) / calls / batch * 1e6


def describe(rates: Rates, draws: Sequence[float]) -> dict[str, Any]:
    """Describe the spreads, and those of the ratios within the rounds."""
    compared = {
        f"{ours} / {other}": spread(ratios(rates[ours], values))
        for ours in OURS
        if ours in rates
        for other, values in rates.items()
        if other != ours
    }
    return {
        "images_per_second_per_core": {name: spread(values) for name, values in rates.items()},
        "ratios": compared,
        "draw_microseconds_per_image": spread(draws),
    }


if __name__ == "__main__":
    run(main)
