"""What compressed gradients do to accuracy: a short training each, whose microbatches stand for the nodes of a job.

    python -m benchmarks.comm.compression_pilot --config imagenette --seeds 3 \
        --out benchmarks/results/compression-pilot.json -- --data.root data/imagenette

The training is the product's own, in one process; only the sum of the microbatches' gradients is made by a way of
benchmarks/comm/compressors.py. Ways take turns, seed by seed. Words after -- are options of bigbatch train.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bigbatch.trainer.build.parts as build_parts
from benchmarks.comm.compressors import CODES, Direct, PowerSgd, matrix_shapes
from benchmarks.record import conditions, show, spread, write_record
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.trainer.in_python import train
from bigbatch.trainer.run.hooks import TrainingHooks

WAYS = ("float32", "bfloat16", "int8", "int8, feedback", "e4m3", "PowerSGD 4", "PowerSGD 1")


class CompressedReducer(GradientReducer):
    """Takes each microbatch's gradient for a node's share, and has them summed by the way."""

    way = "float32"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"learn_order": False}))  # kept errors lie in the buffers' layout
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._sum = make_sum(self.way, [matrix_shapes(buffer.tensors, shapes) for buffer in self.plan.buffers])
        self._shares: list[list[Tensor]] = []

    @torch.no_grad()
    def fold(self) -> None:
        """Keep this microbatch's gradient apart."""
        self._shares.append([buffer_N.clone() for buffer_N in self.buffers])
        for buffer_N in self.buffers:
            buffer_N.zero_()

    @torch.no_grad()
    def wait(self) -> None:
        """Return when every gradient is the sum over all microbatches."""
        super().wait()
        self.fold()
        for buffer_N, sum_N in zip(self.buffers, self._sum(self._shares), strict=True):
            buffer_N.copy_(sum_N)
        self._shares.clear()


def make_sum(way: str, tensors: Sequence[Sequence[tuple[int, ...]]]) -> Direct | PowerSgd:
    """Make what sums the shares of one run."""
    name, _, rest = way.partition(", ")
    if name.startswith("PowerSGD"):
        return PowerSgd(tensors, int(name.split()[1]))
    return Direct(CODES[name][0], feedback=bool(rest))


def main() -> None:
    """Train all, print, write the record."""
    options = parse()
    torch.set_num_threads(1)
    build_parts.GradientReducer = CompressedReducer  # type: ignore[attr-defined]
    facts = conditions(options)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    for seed in range(options.seeds):
        for way in options.ways:
            found[way].append(train_once(way, seed, options))
            print(f"seed {seed}, {way}: {found[way][-1]}", file=sys.stderr, flush=True)
            rows = {each: describe(runs) for each, runs in found.items() if runs}
            write_record(options.out, {"benchmark": "compression_pilot", "conditions": facts, "ways": rows})
    for way, row in rows.items():
        print(show(way, spread(row["top1"]["each"]), unit="top-1"))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="imagenette", help="recipe (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", type=lambda text: text.split("/"), default=WAYS, help="by / (default: all)")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    parser.add_argument("overrides", nargs="*", metavar="OPTION", help="of bigbatch train, as --run.epochs=3")
    return parser.parse_args(argv)


def train_once(way: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return top-1 and loss of the last evaluation."""
    CompressedReducer.way = way
    words = dict(word.removeprefix("--").split("=", 1) for word in options.overrides)
    losses: list[float] = []
    hooks = TrainingHooks(on_evaluation=lambda record, model: losses.append(record["loss"]))
    with tempfile.TemporaryDirectory() as folder:
        summary = train(options.config, words | {"run.seed": seed, "run.directory": folder}, hooks=hooks, quiet=True)
    return {"top1": summary["top1"], "loss": losses[-1]}


def describe(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Describe one way's seeds."""
    return {name: {**spread([run[name] for run in runs]), "each": [run[name] for run in runs]} for name in runs[0]}


if __name__ == "__main__":
    main()
