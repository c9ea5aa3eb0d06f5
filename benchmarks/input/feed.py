"""Training fed by real images beside training on generated tensors: the wait of steps, and the cost of the input.

    python -m benchmarks.input.feed data/shapes --ranks 2 --out benchmarks/results/input-feed-quickstart.json
    python -m benchmarks.input.feed data/imagenet --ranks 1 --out benchmarks/results/input-feed-resnet50.json -- \\
        --config imagenet/resnet50_8k --batch.global_batch_size 256 --batch.microbatch_size 256 --run.epochs 1 \\
        --schedule.warmup_epochs 1 --schedule.decay_epochs null

Each repetition runs `bigbatch train` twice, once with the config's loader on ROOT and once with data.loader=synthetic,
in turn, in the order of a coin. What follows -- are options of `bigbatch train`, by default --config quickstart.
The figures are those of each run's summary.json; a ratio is of the two runs of one repetition. Training on generated
tensors also leaves the loader's cores to the model, which on a CPU is the larger part of the difference. Configs with
data.crop=padded, such as cifar10, cannot be compared: their images lie on the device, none is read while training.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import at_least, conditions, run, show, spread, write_record
from bigbatch.errors import DataError
from bigbatch.trainer.input.data_root import open_split

UNITS = {
    "input_wait_fraction": "of the step",
    "images_per_second": "images/s",
    "compute_images_per_second": "images/s",
    "loader_images_per_second": "images/s",
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    facts = conditions(options)
    index = open_split(options.root, "train")
    facts |= {"images": len(index), "classes": len(index.classes)}
    real = ["--data.root", str(options.root), "--data.num_classes", str(len(index.classes))]
    generated = ["--data.loader", "synthetic", "--data.num_synthetic_samples", str(len(index))]
    summaries: dict[str, list[dict[str, Any]]] = {"real": [], "generated": []}
    for number in range(options.repetitions):
        turns = [("real", real), ("generated", [*real, *generated])]
        for name, overrides in random.Random(number).sample(turns, len(turns)):
            summaries[name].append(train(options, overrides))
    record = {"benchmark": "feed", "conditions": facts, **describe(summaries)}
    for name, values in record["real"].items():
        print(show(name, values, unit=UNITS[name]), file=sys.stderr)
    print(show("real / generated", record["real / generated"], unit=""), file=sys.stderr)
    write_record(options.out, record)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, at_least(1)
    add("root", type=Path, help="data set with train and val, in class folders or packed")
    add("--ranks", type=count, default=2, help="under mpirun; 1 for a single process (default: %(default)s)")
    add("--repetitions", type=count, default=3, help="pairs of runs (default: %(default)s)")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    ours = list(sys.argv[1:] if argv is None else argv)
    theirs = ["--config", "quickstart"]
    if "--" in ours:
        at = ours.index("--")
        ours, theirs = ours[:at], ours[at + 1 :]
    options = parser.parse_args(ours)
    options.overrides = theirs
    return options


def train(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Train, and return the summary of one run. Raises: DataError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="bigbatch-feed-") as folder:
        command = [sys.executable, "-m", "bigbatch"]
        if options.ranks > 1:
            command += ["launch", "mpirun", "--ranks", str(options.ranks), "--"]
        command += ["train", *options.overrides, *overrides, "--run.directory", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise DataError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stdout[-500:]}")
        return dict(json.loads((Path(folder) / "summary.json").read_text()))


def describe(summaries: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Describe spreads of all summaries' facts, and of the ratio of rates within the repetitions."""
    pairs = zip(summaries["real"], summaries["generated"], strict=True)
    return {
        "real": {name: spread(values) for name in UNITS if None not in (values := _stated(name, summaries["real"]))},
        "generated_images_per_second": spread([summary["images_per_second"] for summary in summaries["generated"]]),
        "real / generated": spread([real["images_per_second"] / made["images_per_second"] for real, made in pairs]),
        "device": summaries["real"][0]["device"],
        "precision": summaries["real"][0]["precision"],
        "loader": summaries["real"][0]["loader"],
        "world_size": summaries["real"][0]["world_size"],
    }


def _stated(name: str, summaries: list[dict[str, Any]]) -> list[Any]:
    return [summary[name] for summary in summaries]


if __name__ == "__main__":
    run(main)
