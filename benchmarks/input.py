"""Pictures per second of each loader over one folder, side by side in one run, and the cost of the draws.

    python benchmarks/input.py --root data/imagenet --loader dali folder --batch 256 --threads 16

The loaders take turns, so that a busy machine slows all of them. The first pass of each is not counted: it
builds the pipeline and brings the files into the page cache, so the figures are those of cached files.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from bigbatch.trainer.data.augment import random_resized_crop
from bigbatch.trainer.data.dali import DaliLoader
from bigbatch.trainer.data.folder import FolderLoader
from bigbatch.trainer.data.imagenet import PictureIndex, read_index
from bigbatch.trainer.data.loader import Loader, Request
from bigbatch.trainer.data.synthetic import SyntheticLoader


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with <split>/<class>/<picture>")
    parser.add_argument("--split", default="train")
    kinds = ["dali", "folder", "synthetic"]
    parser.add_argument("--loader", nargs="+", choices=kinds, default=["dali", "folder"])
    parser.add_argument("--device-id", type=int, default=None, help="GPU that decodes for dali (default: CPU)")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256, help="microbatch size")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prefetch", type=int, default=2, help="batches decoded ahead")
    parser.add_argument("--batches", type=int, default=20, help="batches per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def make_loader(kind: str, *, index: PictureIndex, args: argparse.Namespace) -> Loader:
    device = "cpu" if args.device_id is None else f"cuda:{args.device_id}"
    sizes = {"image_size": args.image_size, "microbatch_size": args.batch}
    if kind == "synthetic":
        return SyntheticLoader(num_classes=len(index.classes), device=device, **sizes)
    work = {"num_threads": args.threads, "prefetch_batches": args.prefetch}
    crop = random_resized_crop(seed=0)
    if kind == "folder":
        return FolderLoader(index=index, crop=crop, **sizes, **work)
    return DaliLoader(index=index, crop=crop, device_id=args.device_id, **sizes, **work)


def random_requests(*, num_samples: int, batch: int, batches: int, epoch: int) -> list[Request]:
    """Batches of any size from a folder of any size: samples repeat, with another box in another epoch."""
    generator = np.random.default_rng(epoch)
    valid_B = np.ones(batch, bool)
    return [
        Request(epoch * batches + number, generator.integers(num_samples, size=batch), valid_B)
        for number in range(batches)
    ]


def pictures_per_second(loader: Loader, requests: Sequence[Request]) -> float:
    start = time.perf_counter()
    count = sum(len(batch.labels_B) for batch in loader.load(requests))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def draw_microseconds(*, batch: int) -> float:
    """What random_resized_crop costs per sample on one core."""
    crop, indices_B = random_resized_crop(seed=0), np.arange(batch)
    sizes_B2 = np.tile(np.array([[375, 500]]), (batch, 1))
    start, calls = time.perf_counter(), 50
    for epoch in range(calls):
        crop(epoch, indices_B, sizes_B2)
    return (time.perf_counter() - start) / calls / batch * 1e6


def report(name: str, values: Sequence[float], *, unit: str) -> None:
    low, median, high = min(values), statistics.median(values), max(values)
    print(f"{name:<12} {median:10.1f} {unit}  (n={len(values)}, {low:.1f} to {high:.1f})")


def repeated(measure: Callable[[], float], *, repeats: int) -> list[float]:
    return [measure() for _ in range(repeats)]


def main() -> None:
    args = parse_args()
    index = read_index(args.root, args.split)
    loaders = {kind: make_loader(kind, index=index, args=args) for kind in args.loader}
    speeds: dict[str, list[float]] = {kind: [] for kind in loaders}
    for repeat in range(args.repeats + 1):
        requests = random_requests(num_samples=len(index.paths), batch=args.batch, batches=args.batches, epoch=repeat)
        for kind, loader in loaders.items():
            speed = pictures_per_second(loader, requests)
            if repeat > 0:
                speeds[kind].append(speed)
    for loader in loaders.values():
        loader.close()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{len(index.paths)} pictures, size {args.image_size}, batch {args.batch}, {args.threads} threads")
    for kind, values in speeds.items():
        report(kind, values, unit="pictures/s")
    draws = repeated(lambda: draw_microseconds(batch=args.batch), repeats=args.repeats)
    report("draws", draws, unit="us/picture")


if __name__ == "__main__":
    main()
