"""Cost of a gradient noise scale measurement per training step: CPU time, steps with and without it in turns.

  python -m benchmarks.largebatch.noise_cost --out benchmarks/results/noise-cost-cpu.json

A step of two microbatches of random images by our own training step, on one thread; its processor time others on
the machine change little. A measured step has its hooks put on and taken off, and its figures read, as in a run.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.arguments import run
from benchmarks.largebatch.noise_scale import MICROBATCHES, make_parts
from benchmarks.record import conditions, ratios, show, spread, write_record
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.models import MODELS, build_model
from bigbatch.trainer.step.gradient_noise import GradientNoise
from bigbatch.trainer.step.loop import TrainStep

CLASSES = 10
WARM_UP = 2
"""Turns that do not count."""


def main() -> None:
    """Measure each model, print, write."""
    options = parse()
    facts = conditions(options)
    torch.set_num_threads(1)
    with connect(env=ALONE, backend="gloo") as communicator:
        rows = [measure(name, communicator, options) for name in options.models]
    for row in rows:
        print(show(f"{row['model']}, measured step over plain one", row["ratio"], unit=""))
    record = {"benchmark": "noise cost", "conditions": facts, "clock": "processor seconds of one thread", "rows": rows}
    write_record(options.out, record)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=sorted(MODELS), default=["resnet9", "resnet18", "resnet50"])
    add("--microbatch", type=int, default=32, help=f"images; a step has {MICROBATCHES} of them")
    add("--image-size", type=int, default=32, help="pixels")
    add("--turns", type=int, default=11, help="steps of each kind that count")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    options = parser.parse_args(argv)
    for name in ("microbatch", "image_size", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(options, name)}: give at least 1")
    return options


def measure(name: str, communicator: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time plain and measured steps of one model in turns."""
    torch.manual_seed(0)
    model = build_model(name, num_classes=CLASSES, norm=nn.BatchNorm2d)
    batch = MICROBATCHES * options.microbatch
    plan, parts = make_parts(model, communicator, batch=batch, lr=1e-4, seed=0)
    step, steps = TrainStep(plan, parts), itertools.count()
    stream = InputStream(itertools.repeat(_make_batch(options)))
    kinds = {"plain": GradientNoise(plan, parts, every_steps=0), "measured": GradientNoise(plan, parts, every_steps=1)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}

    def one(noise: GradientNoise) -> None:
        done = next(steps)
        noise.before_step(done)
        step(done, stream)
        noise.after_step(done + 1)
        noise.take()

    for turn in range(WARM_UP + options.turns):
        for kind in kinds if turn % 2 else reversed(kinds):
            took = _timed(lambda kind=kind: one(kinds[kind]))  # type: ignore[misc]
            if turn >= WARM_UP:
                seconds[kind].append(took)
    parts.close()
    return {
        "model": name,
        "num_parameters": sum(each.numel() for each in model.parameters()),
        "global_batch_size": batch,
        **{f"{kind}_seconds": spread(values) for kind, values in seconds.items()},
        "ratio": spread(ratios(seconds["measured"], seconds["plain"])),
    }


def _timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _make_batch(options: argparse.Namespace) -> Batch:
    size = options.microbatch
    images_BCHW = torch.randn(size, 3, options.image_size, options.image_size)
    request = Request(0, np.arange(size), np.ones(size, bool))
    return Batch(images_BCHW, torch.arange(size) % CLASSES, torch.ones(size, dtype=torch.bool), request)


if __name__ == "__main__":
    run(main)
