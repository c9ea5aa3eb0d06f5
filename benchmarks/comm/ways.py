"""All gradients of networks summed by several settings of ours, in turns, without arithmetic. A rank program.

    python -m benchmarks.comm.run --only ways-wires --out benchmarks/results
    python -m benchmarks.comm.run --only ways-paper --out benchmarks/results

wires: what the precision between ranks costs and saves. paper: the comparison of Jia
et al. 2018 in miniature, in fp16, as there: a flat ring over all ranks that sums each gradient by itself, against a
hierarchical all-reduce of fused ones, and one change at a time between them. A repetition is the time from the start of
backward, which costs next to nothing (benchmarks/comm/gradient_sets.py), to the last sum on the slowest rank. Every
gradient is checked after every repetition. No goodput is needed, so the links are
not measured: the cases give their rate.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.arguments import require_at_least_one
from benchmarks.comm import peers
from benchmarks.comm.case_run import begin, choose_contestants, job_parser
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
    """How the gradients are summed."""

    algorithm: str
    wire: str | None
    sizes: PlanSizes = DEFAULT_SIZES


WAYS = {
    "wires": {
        "float32": Way("hierarchical", None),
        "float16": Way("hierarchical", "float16"),
        "bfloat16": Way("hierarchical", "bfloat16"),
    },
    "paper": {
        "unfused ring": Way("ring", "float16", ALONE_EACH),
        "fused ring": Way("ring", "float16"),
        "unfused hierarchical": Way("hierarchical", "float16", ALONE_EACH),
        "fused hierarchical": Way("hierarchical", "float16"),
    },
}
"""The first one of each is the base of the comparison."""


def main() -> None:
    """Measure, and write the record."""
    run_rank(partial(run, parse()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = job_parser(__doc__)
    parser.add_argument("--ways", choices=WAYS, default="wires", help="which comparison (default: %(default)s)")
    parser.add_argument("--model", default="resnet50", help="model of the gradients (default: %(default)s)")
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
    """Make a contestant over a separate model. Collective. Wrong gradients are counted in wrong[name]."""
    model = CostlessModel(values, weight=job.rank + 1)
    communicator = job.communicator.with_algorithm(way.algorithm, wire=make_wire(way.wire))
    reducer = GradientReducer(model.named_parameters(), communicator, **asdict(way.sizes))
    ready: list[Tensor] = []
    world_size = job.communicator.world_size

    def prepare() -> None:
        reducer.zero_grad()
        ready[:] = [model(start())]

    def work() -> None:
        ready[0].backward()
        reducer.wait()

    def finish() -> None:
        wrong[name] += count_wrong(list(model.parameters()), expected=world_size * (world_size + 1) / 2)

    return Contestant(name, work, prepare=prepare, finish=finish)


if __name__ == "__main__":
    main()
