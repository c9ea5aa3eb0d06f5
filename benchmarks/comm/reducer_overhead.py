"""Cost of the gradient reducer on one rank, without communication: steps with it and without, in turn.

    python -m benchmarks.comm.reducer_overhead --device cuda --out benchmarks/results/reducer-overhead.json

A step is forward, backward and an SGD update. The plain loop drops its gradients after each step (what PyTorch does by
default), the one with the reducer keeps them in fusion buffers. On a GPU both also run as CUDA graphs of a whole step.
A repetition is --steps steps in a row, up to the device's end; contestants take turns. The ratio is that of neighbours
in one turn: with the reducer / without.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.suite.device import device_conditions
from benchmarks.gpu.suite.job import seconds_of
from benchmarks.largebatch.lars_step import captured
from benchmarks.record import at_least, conditions, ratios, spread, write_record
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.models import build_model

WARM_UP_STEPS = 5
"""Steps before timing; the reducer learns the order of gradients in the first one."""
TARGET = 1.01
"""Largest ratio of step times with CUDA graphs, on a GPU."""

Step = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    device = torch.device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    alone = replace(ALONE, host=platform.node())
    communicator = connect(env=alone, device=device)
    pairs = {"eager": (make_step(options), make_step(options, communicator=communicator))}
    if device.type == "cuda":
        pairs["CUDA graph"] = (
            captured(make_step(options)),
            captured(make_step(options, communicator=communicator)),
        )
    results = {}
    for kind, (plain, reducer) in measure(pairs, options=options).items():
        ratio = spread(ratios(reducer, plain))
        results[kind] = {
            "plain_seconds": spread([each / options.steps for each in plain]),
            "reducer_seconds": spread([each / options.steps for each in reducer]),
            "ratio": ratio,
        }
        print(
            f"{kind:12} {1e3 * results[kind]['plain_seconds']['median']:9.3f} ms a step without, "
            f"{1e3 * results[kind]['reducer_seconds']['median']:9.3f} ms with the reducer: ratio {ratio['median']:.4f} "
            f"({ratio['min']:.4f} to {ratio['max']:.4f}, n = {ratio['n']})"
        )
    if options.out:
        record = {
            "benchmark": "reducer_overhead",
            "conditions": conditions(options) | device_conditions(device),
            "results": results,
        }
        write_record(options.out, record)
        print(f"written: {options.out}", file=sys.stderr)
    communicator.close()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; sizes follow from the device where they are not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add, count = parser.add_argument, at_least(1)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--model", help="default: resnet50 on a GPU, resnet18 else")
    add("--batch", type=count, help="images; default: 128 on a GPU, 4 else")
    add("--image-size", type=count, help="pixels; default: 224 on a GPU, 64 else")
    add("--precision", choices=("float32", "bfloat16"), help="autocast; default: bfloat16 on a GPU, float32 else")
    add("--steps", type=count, default=5, help="per repetition (default: %(default)s)")
    add("--repetitions", type=count, default=30, help="(default: %(default)s)")
    add("--threads", type=int, help="threads of the CPU")
    add("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    defaults = ("resnet50", 128, 224, "bfloat16") if options.device == "cuda" else ("resnet18", 4, 64, "float32")
    for name, value in zip(("model", "batch", "image_size", "precision"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def make_step(options: argparse.Namespace, *, communicator: Communicator | None = None) -> Step:
    """Make a whole step on a fresh network; with a communicator, its gradients go through a reducer."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    network = build_model(options.model, num_classes=1000, norm=nn.BatchNorm2d)
    network = network.to(device).to(memory_format=torch.channels_last)
    images = torch.randn(options.batch, 3, options.image_size, options.image_size, device=device)
    images_BCHW = images.to(memory_format=torch.channels_last)
    labels_B = torch.randint(1000, (options.batch,), device=device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)
    reducer = GradientReducer(network.named_parameters(), communicator) if communicator else None

    is_half = options.precision == "bfloat16"

    def step() -> None:
        # a cached cast would outlive the graph in which it was made
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_half, cache_enabled=False):
            loss = F.cross_entropy(network(images_BCHW).float(), labels_B)
        loss.backward()
        if reducer:
            reducer.wait()
        optimizer.step()
        if reducer:
            reducer.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=True)

    return step


def measure(
    pairs: dict[str, tuple[Step, Step]], *, options: argparse.Namespace
) -> dict[str, tuple[list[float], list[float]]]:
    """Measure the seconds of each repetition, without and with the reducer; the order alternates."""

    def timed(step: Step, count: int) -> float:
        return seconds_of(lambda: [step() for _ in range(count)], device=torch.device(options.device))

    for pair in pairs.values():
        for step in pair:
            timed(step, WARM_UP_STEPS)
    seconds: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in pairs}
    for turn in range(options.repetitions):
        for kind, pair in pairs.items():
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                seconds[kind][index].append(timed(pair[index], options.steps))
    return seconds


if __name__ == "__main__":
    main()
