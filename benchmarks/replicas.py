"""Cost of comparing the ranks' weights every run.compare_every_steps, as a share of the steps between.

    python -m benchmarks.replicas --out benchmarks/results/replicas-cpu.json

Steps (forward, backward, fused SGD with momentum) and digests of weights and momentum take turns: a pair gives a ratio.
What travels, 8 bytes of each rank in one all-reduce, is not in it. The fewer and smaller the images, the larger the
share.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.largebatch.lars_step import Action, seconds_of
from benchmarks.record import conditions, ratios, show, spread, write_record
from bigbatch.trainer.config.sections import RunConfig
from bigbatch.trainer.models import build_model
from bigbatch.trainer.step.replicas import digest


def main() -> None:
    """Measure, print, write the record."""
    options = parse()
    torch.set_num_threads(options.threads)
    facts = conditions(options)
    step, compare = make_actions(options)
    for action in (step, compare):  # momentum is allocated, and kernels are chosen
        action()
    seconds: dict[str, list[float]] = {"step": [], "digest": []}
    for _ in range(options.rounds):
        seconds["step"].append(seconds_of(step, device=options.device))
        seconds["digest"].append(seconds_of(compare, device=options.device))
    percent = [100 * ratio / options.every_steps for ratio in ratios(seconds["digest"], seconds["step"])]
    figures = {name: spread([1e3 * each for each in values]) for name, values in seconds.items()}
    for name, values in figures.items():
        print(show(name, values, unit="ms"), file=sys.stderr)
    print(show(f"share, every {options.every_steps} steps", spread(percent), unit="%"), file=sys.stderr)
    write_record(
        options.out,
        {
            "benchmark": "replicas",
            "conditions": facts,
            "milliseconds": figures,
            "percent_of_steps": spread(percent),
        },
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="resnet50", help="value of model.name")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="images of a rank and step")
    parser.add_argument("--every-steps", type=int, default=RunConfig.compare_every_steps)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: all)")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def make_actions(options: argparse.Namespace) -> tuple[Action, Action]:
    """Make a training step, and a digest of all that it changes, which is read at the end."""
    model, optimizer, step = make_training(options)

    def compare() -> None:
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        digest([*model.parameters(), *momenta]).tolist()

    return step, compare


def make_training(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, Action]:
    """Make a model, its optimizer, and a step: forward, backward, fused SGD with momentum."""
    torch.manual_seed(0)
    model = build_model(options.model, num_classes=1000, norm=nn.BatchNorm2d).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    images_BCHW = torch.randn(options.batch, 3, options.image_size, options.image_size, device=options.device)
    labels_B = torch.randint(1000, (options.batch,), device=options.device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images_BCHW), labels_B).backward()
        optimizer.step()

    return model, optimizer, step


if __name__ == "__main__":
    main()
