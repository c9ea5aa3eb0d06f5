"""Sums of bf16 gradients over tcp: made in fp32 and rounded at each hop, in turn, by algorithm. A rank program.

    bigbatch launch emulate run --nodes 8 --ranks-per-node 1 --link 100mbit --python -- \
        -m benchmarks.comm.half_sums --out half-sums.json

What comm.reduce_dtype costs: in fp32 the first half of a ring goes straight from each rank to the one that sums a part,
with as many bytes as hop by hop; doubling and native send fp32, twice the bytes. Every contestant first sums whole
numbers, and all elements are compared with the exact sum. A repetition is as many sums in a row as fit into 0.1
seconds; the ratio is that of neighbours in one turn: in fp32 / by the hop.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import require_at_least_one
from benchmarks.comm import peers
from benchmarks.comm.case_run import begin, choose_contestants, job_parser
from benchmarks.comm.entries import Entry, ours_entry
from benchmarks.comm.exchange import LOOP_SECONDS, MOST_LOOPS, check, make_contestant, parse_sizes
from benchmarks.comm.job import Job, run_rank
from benchmarks.comm.turns import describe_repetitions, take_turns
from benchmarks.record import ratios, spread
from bigbatch.comm.connection import make_wire

DTYPE = torch.bfloat16
WAYS = {"in fp32": "fp32", "by the hop": "wire"}
"""comm.reduce_dtype of each."""


def main() -> None:
    """Measure, and write the record."""
    run_rank(partial(run, parse()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; contestants are algorithms."""
    parser = job_parser(__doc__)
    parser.add_argument(
        "--sizes", type=parse_sizes, default="1e4,1e5,1e6,1e7", help="bytes of bf16 (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    require_at_least_one(parser, options, "repetitions")
    return options


def run(options: argparse.Namespace) -> None:
    """Run one case. Collective. Raises: CommError."""
    case = begin(options)
    job = case.job
    names = choose_contestants(options.contestants, job.communicator.algorithms, left_out={})
    pairs = {name: make_pair(job, name) for name in names}
    most_N = job.communicator.allocate(max(options.sizes) // DTYPE.itemsize, DTYPE)
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        part_N = most_N[: size // DTYPE.itemsize]
        for name, pair in pairs.items():
            rows.append(measure_pair(job, name, pair, part_N, repetitions=options.repetitions))
            job.say(show(rows[-1]))
    case.measure_links_again()
    if job.rank == 0:
        case.write("half_sums", {"dtype": str(DTYPE).removeprefix("torch."), "rows": rows})
    peers.close(job)


def make_pair(job: Job, algorithm: str) -> dict[str, Entry]:
    """Make the two ways in which an algorithm sums. Collective."""
    return {
        way: ours_entry(
            job.communicator.with_algorithm(algorithm, wire=make_wire(None, reduce_dtype=reduce_dtype)), wire="bfloat16"
        )
        for way, reduce_dtype in WAYS.items()
    }


def measure_pair(
    job: Job, algorithm: str, pair: Mapping[str, Entry], part_N: Tensor, *, repetitions: int
) -> dict[str, Any]:
    """Make the row of one algorithm at one size. Collective."""
    checked = {way: check(job, way, entry, part_N) for way, entry in pair.items()}
    loops = max(1, min(MOST_LOOPS, int(LOOP_SECONDS / max(seconds for seconds, _ in checked.values()))))
    part_N.zero_()
    contestants = [make_contestant(way, entry, part_N, loops=loops) for way, entry in pair.items()]
    measured = take_turns(job, contestants, repetitions=repetitions)
    ways = {way: describe_repetitions(repeated, loops=loops) for way, repeated in measured.items()}
    return {
        "contestant": algorithm,
        "size": part_N.nbytes,
        "num_wrong": sum(num_wrong for _, num_wrong in checked.values()),
        "ways": ways,
        "ratio": spread(ratios(*(ways[way]["each_seconds"] for way in WAYS))),
    }


def show(row: Mapping[str, Any]) -> str:
    """Show a row in a line: milliseconds of both ways, and their ratio."""
    times = ", ".join(f"{way} {1e3 * each['seconds']['median']:.4g} ms" for way, each in row["ways"].items())
    ratio = row["ratio"]
    return (
        f"{row['size']:>11,} bytes, {row['contestant']}: {times}, ratio {ratio['median']:.3f} "
        f"({ratio['min']:.3f} to {ratio['max']:.3f}, n = {ratio['n']})"
        + (f"; {row['num_wrong']} WRONG" if row["num_wrong"] else "")
    )


if __name__ == "__main__":
    main()
