"""Cost of a checkpoint for training, as a share of the interval between two: written beside steps, and waited for.

    python -m benchmarks.checkpoint --out benchmarks/results/checkpoint.json

In each round some steps are timed alone; then one checkpoint is waited for, as all ranks once waited; then another one
is copied and written beside steps until it is on disk. Its cost is the copy, for which training waits, and by how much
these steps took longer than as many alone. With several ranks, add what they take to agree, some milliseconds.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least
from benchmarks.largebatch.lars_step import Action, seconds_of
from benchmarks.record import conditions, file_system, show, spread, write_record
from benchmarks.replicas import make_training
from bigbatch.trainer.run.background import BackgroundWrite, copy_to_host
from bigbatch.trainer.run.checkpoint import save_checkpoint


def main() -> None:
    """Measure, print, write the record."""
    options = parse()
    torch.set_num_threads(options.threads)
    facts = conditions(options)
    model, optimizer, step = make_training(options)
    step()  # momentum is allocated, and kernels are chosen

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    seconds: dict[str, list[float]] = {"step": [], "waited for": [], "copy": [], "beside": []}
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        facts["file_system"] = file_system(Path(folder))
        for number in range(options.rounds):
            for name, value in measure(step, state, Path(folder), number=number, options=options).items():
                seconds[name].append(value)
        num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*/state.pt"))
    percent = {
        "waited for": [100 * each / options.interval_seconds for each in seconds["waited for"]],
        "copy alone": [100 * each / options.interval_seconds for each in seconds["copy"]],
        "beside steps": [
            100 * (copy + beside) / options.interval_seconds
            for copy, beside in zip(seconds["copy"], seconds["beside"], strict=True)
        ],
    }
    figures = {name: spread([1e3 * each for each in values]) for name, values in seconds.items()}
    shares = {name: spread(values) for name, values in percent.items()}
    for name, values in figures.items():
        print(show(name, values, unit="ms"), file=sys.stderr)
    for name, values in shares.items():
        print(show(name, values, unit=f"% of {options.interval_seconds} s"), file=sys.stderr)
    write_record(
        options.out,
        {
            "benchmark": "checkpoint",
            "conditions": facts,
            "bytes": num_bytes,
            "milliseconds": figures,
            "percent_of_interval": shares,
        },
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="resnet50", help="value of model.name")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="images of a rank and step")
    parser.add_argument("--interval-seconds", type=at_least(1), default=60, help="between two checkpoints")
    parser.add_argument("--rounds", type=at_least(1), default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: all)")
    parser.add_argument("--scratch", type=Path, default=Path(), help="a folder on the disk that is written to")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def measure(
    step: Action, state: Callable[[], dict[str, Any]], folder: Path, *, number: int, options: argparse.Namespace
) -> dict[str, float]:
    """Time a step alone, a checkpoint that is waited for, and one beside steps: its copy and its delay of these."""

    def save(kept: dict[str, Any], *, checkpoint: int) -> Path:
        return save_checkpoint(folder, kept, step=2 * number + checkpoint, top1=None, keep=1)

    alone = statistics.median(seconds_of(step, device=options.device) for _ in range(5))
    start = time.perf_counter()
    save(state(), checkpoint=0)
    waited = time.perf_counter() - start
    start = time.perf_counter()
    copied = copy_to_host(state())
    copy = time.perf_counter() - start
    write = BackgroundWrite(None, lambda *_: save(copied, checkpoint=1), name="checkpoint", started=time.monotonic())
    num_steps, beside = 0, 0.0
    while not write.ends_within(0.0):
        beside += seconds_of(step, device=options.device)
        num_steps += 1
    if write.error is not None:
        raise write.error
    return {"step": alone, "waited for": waited, "copy": copy, "beside": beside - num_steps * alone}


if __name__ == "__main__":
    main()
