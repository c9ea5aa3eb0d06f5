"""All gradients of networks summed by several settings of ours, in turns, without arithmetic. A rank program.

    python -m benchmarks.comm.run --only ways-wires --out benchmarks/results
    python -m benchmarks.comm.run --only ways-paper --out benchmarks/results

wires: what the precision between ranks costs and saves; PowerSGD is a prototype (benchmarks/comm/compressors.py) that
works on the whole gradient after backward, and sums its factors by the same communicator. paper: the comparison of Jia
et al. 2018 in miniature, in fp16, as there: a flat ring over all ranks that sums each gradient by itself, against a
hierarchical all-reduce of fused ones, and one change at a time between them. A repetition is the time from the start of
backward, which costs next to nothing (benchmarks/comm/gradient_sets.py), to the last sum on the slowest rank. Every
gradient is checked after every repetition, but PowerSGD's, which are not exact. No goodput is needed, so the links are
not measured: the cases give their rate.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arguments import require_at_least_one
from benchmarks.comm import peers
from benchmarks.comm.case_run import begin, choose_contestants, job_parser
from benchmarks.comm.compressors import shrinks
from benchmarks.comm.gradient_sets import CostlessModel, count_wrong, make_values, parameter_shapes, start
from benchmarks.comm.job import Job, run_rank
from benchmarks.comm.turns import Contestant, describe_repetitions, take_turns
from benchmarks.record import ratios, spread
from bigbatch.comm.connection import make_wire
from bigbatch.comm.gradients.fusion import DEFAULT_SIZES, PlanSizes
from bigbatch.comm.gradients.reducer import GradientReducer

ALONE_EACH = PlanSizes(1, 1, None)
"""No gradient shares a buffer."""


@dataclass(frozen=True)
class Way:
    """Says how the gradients are summed."""

    algorithm: str
    wire: str | None
    sizes: PlanSizes = DEFAULT_SIZES
    rank: int | None = None
    """Of PowerSGD's factors; None for no such."""


WAYS = {
    "wires": {
        "float32": Way("hierarchical", None),
        "float16": Way("hierarchical", "float16"),
        "bfloat16": Way("hierarchical", "bfloat16"),
        "int8": Way("hierarchical", "int8"),
        "PowerSGD 4": Way("hierarchical", None, rank=4),
    },
    "paper": {
        "unfused ring": Way("ring", "float16", ALONE_EACH),
        "fused ring": Way("ring", "float16"),
        "unfused hierarchical": Way("hierarchical", "float16", ALONE_EACH),
        "fused hierarchical": Way("hierarchical", "float16"),
    },
}
"""The first of each is what the others are compared with."""


def main() -> None:
    """Measure, and write the record."""
    run_rank(partial(run, parse()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = job_parser(__doc__)
    parser.add_argument("--ways", choices=WAYS, default="wires", help="which comparison (default: %(default)s)")
    parser.add_argument("--model", default="resnet50", help="whose gradients (default: %(default)s)")
    options = parser.parse_args(argv)
    require_at_least_one(parser, options, "repetitions")
    return options


def run(options: argparse.Namespace) -> None:
    """Run one case. Collective. Raises: CommError."""
    case = begin(options)
    job, ways = case.job, WAYS[options.ways]
    names = choose_contestants(options.contestants, tuple(ways), left_out={})
    found = measure(job, options.model, {name: ways[name] for name in names}, repetitions=options.repetitions)
    if job.rank == 0:
        case.write("ways", {"ways": options.ways, "model": options.model, **found})
    peers.close(job)


def measure(job: Job, model: str, ways: dict[str, Way], *, repetitions: int) -> dict[str, Any]:
    """Take turns at one network's gradients. Collective."""
    values = make_values(parameter_shapes(model))
    wrong = dict.fromkeys(ways, 0)
    contestants = [make_contestant(job, name, way, values, wrong) for name, way in ways.items()]
    job.say(f"{model}, warming up")
    take_turns(job, contestants, repetitions=2)  # the order is learned in the first step
    wrong.update(dict.fromkeys(ways, 0))
    measured = take_turns(job, contestants, repetitions=repetitions)
    all_wrong = job.gather(wrong)
    first = [each.seconds for each in next(iter(measured.values()))]
    rows = []
    for name, done in measured.items():
        row = {"way": name, "num_wrong": sum(each[name] for each in all_wrong), **describe_repetitions(done)}
        row["times_as_fast"] = spread(ratios(first, [each.seconds for each in done]))
        rows.append(row)
        job.say(
            f"{model} {name:20} {row['seconds']['median']:8.3f} s, {row['node_bytes'] / 1e6:8.1f} MB, "
            f"{row['times_as_fast']['median']:.2f} times as fast, {row['num_wrong']} wrong"
        )
    return {"num_tensors": len(values), "num_bytes": sum(value.nbytes for value in values.values()), "rows": rows}


def make_contestant(job: Job, name: str, way: Way, values: dict[str, Tensor], wrong: dict[str, int]) -> Contestant:
    """Make a contestant over a model of its own. Collective. Wrong gradients are counted in wrong[name]."""
    model = CostlessModel(values, weight=job.rank + 1)
    communicator = job.communicator.with_algorithm(way.algorithm, wire=make_wire(way.wire))
    reducer = GradientReducer(model.named_parameters(), communicator, **asdict(way.sizes))
    factors = PowerSgdStep(reducer, rank=way.rank) if way.rank else None
    ready: list[Tensor] = []
    world_size = job.communicator.world_size

    def prepare() -> None:
        reducer.zero_grad()
        ready[:] = [model(start())]

    def work() -> None:
        ready[0].backward()
        (factors or reducer).wait()

    def finish() -> None:
        if factors is None:
            wrong[name] += count_wrong(list(model.parameters()), expected=world_size * (world_size + 1) / 2)

    if factors is not None:
        reducer.is_active = False  # what travels is what the step makes of the gradients
    return Contestant(name, work, prepare=prepare, finish=finish)


class PowerSgdStep:
    """Sums factors of the gradients' matrices, and in fp32 what is not factored, by a reducer's communicator."""

    def __init__(self, reducer: GradientReducer, *, rank: int) -> None:
        self._communicator, self._rank = reducer._communicator, rank
        self._parameters = list(reducer._parameters.values())
        self._matrices = [p for p in self._parameters if shrinks(tuple(p.shape), rank)]
        self._right = [
            torch.randn(p[0].numel(), rank, generator=torch.Generator().manual_seed(0)) for p in self._matrices
        ]
        self._kept = [torch.zeros(len(p), p[0].numel()) for p in self._matrices]
        rest = sum(p.numel() for p in self._parameters) - sum(p.numel() for p in self._matrices)
        left = sum(rank * len(p) for p in self._matrices)
        sizes = [left + rest, sum(each.numel() for each in self._right)]
        self._left_N, self._right_N = self._communicator.allocate_all([(size, torch.float32) for size in sizes])

    @torch.no_grad()
    def wait(self) -> None:
        """Return when all gradients are what the factors give, the same on all ranks."""
        wanted = [_matrix(p).add(kept) for p, kept in zip(self._matrices, self._kept, strict=True)]
        left = [wanted_NM @ right for wanted_NM, right in zip(wanted, self._right, strict=True)]
        factored = set(map(id, self._matrices))
        rest = [p.grad.flatten() for p in self._parameters if id(p) not in factored and p.grad is not None]
        torch.cat([each.flatten() for each in left] + rest, out=self._left_N)
        self._communicator.sum_(self._left_N, label="left factors")
        sums = self._left_N.split([each.numel() for each in (*left, *rest)])
        left = [torch.linalg.qr(sum_N.view_as(each)).Q for sum_N, each in zip(sums, left, strict=False)]
        right = [wanted_NM.T @ each for wanted_NM, each in zip(wanted, left, strict=True)]
        torch.cat([each.flatten() for each in right], out=self._right_N)
        self._communicator.sum_(self._right_N, label="right factors")
        for index, sum_N in enumerate(self._right_N.split([each.numel() for each in right])):
            # the mean over ranks is what each takes off its own; the sum is the gradient
            self._right[index] = sum_N.view_as(right[index]).clone()
            found_NM = left[index] @ self._right[index].T
            torch.sub(wanted[index], found_NM, alpha=1 / self._communicator.world_size, out=self._kept[index])
            _matrix(self._matrices[index]).copy_(found_NM)
        for p, sum_N in zip((p for p in self._parameters if id(p) not in factored), sums[len(left) :], strict=True):
            assert p.grad is not None
            p.grad.copy_(sum_N.view_as(p))


def _matrix(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.view(len(parameter), -1)


if __name__ == "__main__":
    main()
