"""What bigbatch's own code costs per picture, in microseconds of CPU time: everything but decoding and resizing.

    python -m benchmarks.input.python_cost --out benchmarks/results/input-python-cost.json

reader: EncodedReader alone, with its threads, from class folders and from packed shards: opening, reading from the page
cache, sizes, draws, hand-over. loader: the whole of data.loader=dali on the CPU. The pictures have 16 x 16 pixels, so
that decoding and resizing one is next to nothing: what is left is what each costs whatever its size, DALI's own
overhead included, and so an upper limit for the Python in it. CPU time of all threads of the process, so that threads
that wait cost nothing; the first round is not counted. A picture may cost 50 us, which at 1,000 pictures a second are
5% of a core.
"""

import argparse
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from PIL import Image

from benchmarks.arguments import at_least, run
from benchmarks.record import conditions, show, spread, write_record
from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input.base import ImageSource, Request
from bigbatch.trainer.input.loaders.by_name import make_image_loader
from bigbatch.trainer.input.loaders.encoded import ImageLoader
from bigbatch.trainer.input.order import train_requests
from bigbatch.trainer.input.shards import open_split

SIDE = 16
BATCH = 256
IMAGES_PER_SECOND = 1000


def main() -> None:
    """Measure and write the record."""
    options = parse()
    facts = conditions(options)
    torch.set_num_threads(1)
    costs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bigbatch-python-") as scratch:
        root = Path(scratch)
        make_images(root / "folders", number=options.pictures)
        pack(root / "folders", root / "packed", recipe=PackRecipe(), splits=["train"], num_workers=1)
        loaders = {layout: make_loader(open_split(root / layout, "train")) for layout in ("folders", "packed")}
        for number in range(options.repetitions + 1):
            for layout, loader in loaders.items():
                for part, draw in (("reader", loader.reader.read), ("loader", loader.load)):
                    cost = microseconds(draw, requests(options.pictures, epoch=number))
                    if number:
                        costs.setdefault(f"{part}, {layout}", []).append(cost)
        for loader in loaders.values():
            loader.close()
    results = {name: spread(values) for name, values in costs.items()}
    shares = {name: values["median"] * IMAGES_PER_SECOND / 1e6 for name, values in results.items()}
    for name, values in results.items():
        print(show(name, values, unit="us/picture"), f"{shares[name]:.1%} of a core", file=sys.stderr)
    record = {"benchmark": "python_cost", "conditions": facts, "microseconds_per_picture": results}
    write_record(options.out, record | {f"share_of_a_core_at_{IMAGES_PER_SECOND}_per_second": shares})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pictures", type=at_least(BATCH), default=8192, help="in a round (default: %(default)s)")
    add("--repetitions", type=at_least(1), default=10, help="rounds (default: %(default)s)")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def make_images(root: Path, *, number: int) -> None:
    """Write JPEGs of one colour each in two classes."""
    for position in range(number):
        path = root / "train" / str(position % 2) / f"{position}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE), (position % 256, position // 256 % 256, 0)).save(buffer, "JPEG")
        path.write_bytes(buffer.getvalue())


def make_loader(source: ImageSource) -> ImageLoader:
    """Make a loader as a run of one rank has it on this machine."""
    return make_image_loader(
        "dali",
        source,
        crop=random_resized_crop(seed=0),
        image_size=SIDE,
        microbatch_size=BATCH,
        num_threads=len(os.sched_getaffinity(0)),
        prefetch_batches=2,
    )


def requests(number: int, *, epoch: int) -> list[Request]:
    """Request all pictures but those that do not fill a batch, in the order of an epoch."""
    steps = number // BATCH
    return list(
        train_requests(
            seed=0,
            num_samples=number,
            global_batch_size=BATCH,
            microbatch_size=BATCH,
            rank=0,
            world_size=1,
            start_step=epoch * steps,
            end_step=(epoch + 1) * steps,
        )
    )


def microseconds(draw: Callable[[Sequence[Request]], Iterable[object]], asked: Sequence[Request]) -> float:
    """Measure CPU time of the process per picture."""
    start = time.process_time()
    num_batches = sum(1 for _ in draw(asked))
    seconds = time.process_time() - start
    assert num_batches == len(asked)
    return seconds / (num_batches * BATCH) * 1e6


if __name__ == "__main__":
    run(main)
