"""What run.reproducible costs a step across nodes: sums of int64 on a grid and sums of fp32, in turn. A rank program.

    bigbatch launch emulate run --nodes 2 --ranks-per-node 1 --link 1gbit --python -- \
        -m benchmarks.comm.exact_price --model resnet50 --out exact-price.json

A step is the backward of a network that sleeps in place of computing, its gradients ready in the order and at the
shares of it that the real network's had at the start of this run, and the wait for their sums. Backward takes so many
times (--paces) as the bytes of fp32 need on the link: from 2 on, there is time to hide those of int64, too. What the
grid itself costs runs beside the sleep, as on a device of its own; a processor that computes pays for it in addition
(benchmarks.comm.exact_sums). The limit is what no schedule can beat with as many bytes. The ratio is that of
neighbours in one turn: grid / fp32. All first sum whole numbers, and those that are wrong are counted.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from benchmarks.arguments import require_at_least_one
from benchmarks.comm import links, peers
from benchmarks.comm.case_run import begin, job_parser
from benchmarks.comm.gradient_sets import CostlessModel, Pace, count_wrong, make_values, start
from benchmarks.comm.job import Job, run_rank
from benchmarks.comm.step import make_real_model
from benchmarks.comm.tuning import DEFAULT_ALGORITHM
from benchmarks.comm.turns import Contestant, describe_repetitions, take_turns
from benchmarks.record import ratios, spread
from bigbatch.comm.gradients.grid import Grid
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.measure.backward import measure_backward

BYTES = {"fp32": 4, "grid": 8}
"""Of an element on the wire, by contestant."""


def main() -> None:
    """Measure, and write the record."""
    run_rank(partial(run, parse()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = job_parser(__doc__)
    add = parser.add_argument
    add("--model", default="resnet50", help="(default: %(default)s)")
    add("--batch", type=int, default=1, help="pictures per rank, for the order of gradients (default: %(default)s)")
    add("--image-size", type=int, default=64, help="pixels (default: %(default)s)")
    add("--paces", type=_parse_paces, default="1,2.5,5", metavar="A,B", help="of backward (default: %(default)s)")
    add("--buffer-bytes", type=int, default=4_000_000, help="of a fusion buffer, as it travels (default: %(default)s)")
    options = parser.parse_args(argv)
    require_at_least_one(parser, options, "repetitions", "batch", "image_size", "buffer_bytes")
    return options


def _parse_paces(text: str) -> list[float]:
    paces = [float(word) for word in text.split(",")]
    if min(paces) <= 0:
        raise ValueError(text)
    return paces


def run(options: argparse.Namespace) -> None:
    """Run one case. Collective. Raises: CommError."""
    case = begin(options)
    job, goodput = case.job, links.best_goodput(case.goodput)
    assert goodput is not None, "a link between nodes is what this is about"
    pace, shapes = measure_pace(job, options)
    num_elements = [nn.Parameter(value).numel() for value in make_values(shapes).values()]
    seconds_of_fp32 = links.limit_seconds(4 * sum(num_elements), num_nodes=job.num_nodes, goodput=goodput)
    contestants = {name: make_contestant(job, name, shapes, pace, buffer_bytes=options.buffer_bytes) for name in BYTES}
    rows = []
    for factor in options.paces:
        pace.take(factor * seconds_of_fp32)
        job.say(f"{options.model}, backward of {pace.seconds:.3g} s")
        measured = take_turns(job, [each for each, _ in contestants.values()], repetitions=options.repetitions + 1)
        ways = {name: describe_repetitions(each[1:]) for name, each in measured.items()}  # the first learns the order
        for name, each in ways.items():
            exposed = links.least_exposed_seconds(
                pace.ready_seconds,
                [BYTES[name] * count for count in num_elements],
                num_nodes=job.num_nodes,
                goodput=goodput,
            )
            each["limit_seconds"] = pace.seconds + exposed
        ratio = spread(ratios(ways["grid"]["each_seconds"], ways["fp32"]["each_seconds"]))
        rows.append({"pace": factor, "backward_seconds": pace.seconds, "ways": ways, "ratio": ratio})
        job.say(show(rows[-1]))
    expected = sum(range(1, job.communicator.world_size + 1))
    wrong = {name: count_wrong(model.parameters(), expected=expected) for name, (_, model) in contestants.items()}
    case.measure_links_again()
    if job.rank == 0:
        case.write(
            "exact_price", {"model": options.model, "num_elements": sum(num_elements), "num_wrong": wrong, "rows": rows}
        )
    peers.close(job)


def measure_pace(job: Job, options: argparse.Namespace) -> tuple[Pace, dict[str, tuple[int, ...]]]:
    """Measure when gradients become ready, and list the shapes of the parameters. Collective."""
    model = make_real_model(job, options)
    named = dict(model.network.named_parameters())
    backward = measure_backward(named, lambda: model.loss_of(model.network), job.communicator, seconds=5.0)
    return Pace([backward.ready_seconds[name] for name in named]), {name: tuple(p.shape) for name, p in named.items()}


def make_contestant(
    job: Job, name: str, shapes: Mapping[str, Sequence[int]], pace: Pace, *, buffer_bytes: int
) -> tuple[Contestant, CostlessModel]:
    """Make one of BYTES over parameters of its own. Collective."""
    model = CostlessModel(make_values(shapes), weight=job.rank + 1, pace=pace)
    reducer = GradientReducer(
        model.named_parameters(),
        job.communicator.with_algorithm(DEFAULT_ALGORITHM),
        threshold_bytes=buffer_bytes,
        buffer_bytes=buffer_bytes,
        grid=Grid(job.communicator.world_size) if name == "grid" else None,
    )

    def step() -> None:
        loss = model(start())
        model.begin()
        loss.backward()
        reducer.wait()

    return Contestant(name, step, prepare=reducer.zero_grad), model


def show(row: Mapping[str, Any]) -> str:
    """Show a row in a line to read."""
    ways = ", ".join(
        f"{name} {each['seconds']['median']:.3f} s (limit {each['limit_seconds']:.3f})"
        for name, each in row["ways"].items()
    )
    ratio = row["ratio"]
    return (
        f"backward {row['backward_seconds']:.3f} s: {ways}, ratio {ratio['median']:.3f} "
        f"({ratio['min']:.3f} to {ratio['max']:.3f}, n = {ratio['n']})"
    )


if __name__ == "__main__":
    main()
