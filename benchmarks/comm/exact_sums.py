"""What sums of integers cost a step, and how near to float64 they and sums over other wires are, on real gradients.

    python -m benchmarks.comm.exact_sums --out benchmarks/results/exact-sums-cpu.json

One rank: a step is some microbatches (forward and backward through the reducer, with and without a grid, taking turns).
What travels is twice the bytes of fp32, whatever is measured here. The errors are of the sum of the microbatches'
gradients, each taken for a rank's: ||sum - exact|| / ||exact||, where exact is summed in float64. Pictures are noise.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.largebatch.lars_step import seconds_of
from benchmarks.record import conditions, ratios, show, spread, write_record
from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.grid import Grid
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.models import build_model


def main() -> None:
    """Measure each model, print, write the record."""
    options = parse()
    torch.set_num_threads(options.threads)
    facts = conditions(options)
    models = {name: measure(name, options) for name in options.models}
    write_record(options.out, {"benchmark": "exact_sums", "conditions": facts, "models": models})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"], help="names that model.name takes")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="pictures of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, as run.reproducible has it")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of steps, the share that the grid adds, and errors of sums."""
    steps = {"fp32": make_step(name, None, options), "grid": make_step(name, Grid(options.microbatches), options)}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for step in steps.values():
        step()  # the order is learned, and kernels are chosen
    for _ in range(options.rounds):
        for kind, step in steps.items():
            seconds[kind].append(seconds_of(step, device=options.device))
    percent = [100 * (ratio - 1) for ratio in ratios(seconds["grid"], seconds["fp32"])]
    milliseconds = {kind: spread([1e3 * each for each in values]) for kind, values in seconds.items()}
    for kind, values in milliseconds.items():
        print(show(f"{name} {kind}", values, unit="ms"), file=sys.stderr)
    print(show(f"{name} price", spread(percent), unit="%"), file=sys.stderr)
    found = errors(gradients(name, options))
    for kind, error in found.items():
        print(f"{name} {kind}: {error:.3g}", file=sys.stderr)
    return {"milliseconds": milliseconds, "price_percent": spread(percent), "errors": found}


def make_step(name: str, grid: Grid | None, options: argparse.Namespace) -> Callable[[], None]:
    """Make a step without an update, of one rank."""
    model, backward = make_training(name, options)
    alone = connect(env=ALONE, device=torch.device(options.device))
    reducer = GradientReducer(model.named_parameters(), alone, grid=grid)

    def step() -> None:
        reducer.zero_grad()
        for index in range(options.microbatches):
            reducer.is_active = index == options.microbatches - 1
            backward(index)
            if not reducer.is_active:
                reducer.fold()
        reducer.wait()

    return step


def make_training(name: str, options: argparse.Namespace) -> tuple[nn.Module, Callable[[int], None]]:
    """Make a model, and the backward of one of its microbatches, divided as a step's mean is."""
    torch.manual_seed(0)
    model = build_model(name, num_classes=1000, norm=nn.BatchNorm2d).to(options.device)
    shape = (options.microbatches, options.batch, 3, options.image_size, options.image_size)
    images_MBCHW, labels_MB = torch.randn(shape), torch.randint(1000, shape[:2])

    def backward(index: int) -> None:
        logits_BK = model(images_MBCHW[index].to(options.device))
        loss = F.cross_entropy(logits_BK, labels_MB[index].to(options.device), reduction="sum")
        (loss / (options.microbatches * options.batch)).backward()

    return model, backward


def gradients(name: str, options: argparse.Namespace) -> list[Tensor]:
    """Return each microbatch's gradient, flat, fp32, on the CPU."""
    model, backward = make_training(name, options)
    found = []
    for index in range(options.microbatches):
        model.zero_grad(set_to_none=True)
        backward(index)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).cpu())
    return found


def errors(terms: Sequence[Tensor]) -> dict[str, float]:
    """Return the relative error of each way to add the terms up, and the share of numbers that the grid takes for 0."""
    exact_N = torch.stack([term_N.double() for term_N in terms]).sum(0)

    def over_wire(dtype: torch.dtype) -> Tensor:
        """As comm.reduce_dtype=fp32 does it between nodes of one rank: terms and result are rounded to the wire."""
        return torch.stack([term_N.to(dtype).float() for term_N in terms]).sum(0).to(dtype)

    grid = Grid(len(terms))
    sums_N = torch.zeros(terms[0].numel() + 1, dtype=torch.int64)
    for term_N in terms:
        grid.add_(sums_N, term_N)
    on_grid_N = torch.empty_like(terms[0])
    grid.read_(on_grid_N, sums_N)
    sums = {
        "fp32": torch.stack(list(terms)).sum(0),
        "grid": on_grid_N,
        "fp16 wire": over_wire(torch.float16),
        "bf16 wire": over_wire(torch.bfloat16),
    }
    found = {kind: float((sum_N.double() - exact_N).norm() / exact_N.norm()) for kind, sum_N in sums.items()}
    half_step = 2.0 ** -(grid.fraction_bits + 1)
    num_lost = sum(int(((term_N != 0) & (term_N.abs() <= half_step)).sum()) for term_N in terms)
    return {**found, "share lost below the grid": num_lost / sum(int((term_N != 0).sum()) for term_N in terms)}


if __name__ == "__main__":
    main()
