"""Cost of run.reproducible for a training step, in CPU time of one thread: sums of integers and of fp32, in turns.

    python -m benchmarks.largebatch.reproducible_cost --out benchmarks/results/reproducible-cost-cpu.json

Other work on the machine changes CPU time little. A step is four microbatches of 16 generated images, with the update
of imagenet/resnet50_8k.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.suite.context import SMALL
from benchmarks.gpu.suite.job import contestant, settings_for
from benchmarks.record import at_least, conditions, ratios, run, show, spread, write_record

MICROBATCHES = 4
KINDS: dict[str, dict[str, Any]] = {"fp32": {}, "integers": {"run.reproducible": True}}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, sizes = parser.add_argument, ["resnet18:128", "resnet18:64", "resnet50:64", "alexnet_bn:64"]
    add("--models", nargs="+", default=sizes, metavar="NAME:PIXELS", help="(default: %(default)s)")
    add("--microbatch", type=at_least(1), default=16, help="images (default: %(default)s)")
    add("--rounds", type=at_least(1), default=3, help="steps of each kind (default: %(default)s)")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    options = parser.parse_args(argv)
    facts = conditions(options)
    torch.set_num_threads(1)
    rows = [measure(*each.split(":", 1), options=options) for each in options.models]
    for row in rows:
        print(show(f"{row['model']}, {row['image_size']} pixels", row["percent"], unit="% longer"))
    write_record(options.out, {"benchmark": "reproducible_cost", "conditions": facts, "rows": rows})


def measure(model: str, image_size: str = "64", *, options: argparse.Namespace) -> dict[str, Any]:
    """Time steps of one model; the first round does not count."""
    size = replace(SMALL, model=model, image_size=int(image_size), num_classes=1000)
    settings = settings_for(size, batch=MICROBATCHES * options.microbatch, precision="fp32")
    settings |= {"batch.microbatch_size": options.microbatch, "batch.bn_span": options.microbatch}
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    with ExitStack() as stack:
        kinds = {name: stack.enter_context(closing(contestant(settings | KINDS[name]))) for name in KINDS}
        for _ in range(options.rounds + 1):
            for name, each in kinds.items():
                each.flags.switch()
                start = time.process_time()
                each.run(1)
                seconds[name].append(time.process_time() - start)
    timed = {name: values[1:] for name, values in seconds.items()}
    percent = spread([100 * (each - 1) for each in ratios(timed["integers"], timed["fp32"])])
    spreads = {name: spread(values) for name, values in timed.items()}
    return {"model": model, "image_size": int(image_size), "seconds": spreads, "percent": percent}


if __name__ == "__main__":
    run(main)
