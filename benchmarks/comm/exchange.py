"""All-reduces by size: ours, gloo's, MPI's and Horovod's in one set of processes, in turn. A rank program.

    bigbatch launch emulate run --nodes 4 --ranks-per-node 2 --link 200mbit --python -- \
        -m benchmarks.comm.exchange --out exchange.json

For each size every contestant sums whole numbers once, and all elements are compared with the exact sum; that time
decides which can be repeated within --seconds-per-size, in the order of CONTESTANTS. Hybrid's table is measured at the
start as `bigbatch comm tune` does, and then stays as it is. A repetition is as many sums in a row as fit into 0.1
seconds, from 1 to 50; its time is the slowest rank's, divided by them. The limit is 2(m-1)/m * bytes / goodput for m
nodes, with the goodput of one iperf3 stream between two nodes in this run.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.comm import links
from benchmarks.comm.case_run import begin, choose_contestants, job_parser
from benchmarks.comm.entries import CONTESTANTS, HYBRIDS, Entry, hybrid_entry, make_entries
from benchmarks.comm.job import Job, close, run_rank
from benchmarks.comm.tuning import DEFAULT_ALGORITHM, describe_times
from benchmarks.comm.turns import Contestant, describe_repetitions, take_turns
from bigbatch.comm.algorithms.hybrid import HybridTable, Times
from bigbatch.comm.connection import make_wire
from bigbatch.comm.measure.sizes import make_table, measure_times, sizes_below
from bigbatch.comm.measure.timing import count_different, expected_pattern, fill_, limit_of, rank_pattern
from bigbatch.errors import CommError

SIZES = "1e3,3e3,1e4,3e4,1e5,3e5,1e6,3e6,1e7,3e7,1e8"
LOOP_SECONDS, MAX_LOOPS = 0.1, 50
HOPELESS_BYTES, HOPELESS_RATIO = 1_000_000, 2.0
"""From this size on, one of ours that is slower than our best by this factor is not tried at larger sizes."""


def main() -> None:
    run_rank(partial(run, parse()))


def run(options: argparse.Namespace) -> None:
    """Run one case. Collective. Raises: CommError."""
    case = begin(options)
    job, goodput = case.job, case.goodput
    entries, allocators, left_out = make_entries(job)
    job.say_left_out(left_out)
    names = choose_contestants(options.contestants, [n for n in CONTESTANTS if n in entries], left_out=left_out)
    tuned = {name: tune(job, options, wire=wire) for name, wire in HYBRIDS.items() if name in names}
    entries |= {name: hybrid_entry(job, table, wire=HYBRIDS[name]) for name, (_, table) in tuned.items()}
    most = max(options.sizes) // 4
    tensors = {memory: allocate(most) for memory, allocate in allocators.items()}
    rows: list[dict[str, Any]] = []
    racing = {name: entries[name] for name in names}
    for size in options.sizes:
        at_size = measure_size(job, racing, tensors, size=size, options=options)
        rows += at_size
        racing = without_hopeless(racing, at_size, size=size)
        job.say(show(at_size))
    case.measure_links_again()
    if job.rank == 0:
        results = {
            "tuned": {
                name: {
                    "table": str(table),
                    "times": describe_times(times),
                    "choice": {size: table.choose(size) for size in options.sizes},
                }
                for name, (times, table) in tuned.items()
            },
            "left_out": left_out,
            "rows": with_limit(rows, num_nodes=job.num_nodes, goodput=goodput),
        }
        case.write("exchange", results)
    close(job)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = job_parser(__doc__)
    parser.add_argument("--sizes", type=parse_sizes, default=SIZES, help="bytes (default: %(default)s)")
    parser.add_argument("--seconds-per-size", type=float, default=110.0, help="for all contestants")
    parser.add_argument("--tune-seconds", type=float, default=40.0, help="for each table of hybrid's")
    return parser.parse_args(argv)


def parse_sizes(text: str) -> list[int]:
    """Read '1e3,2000000' as [1000, 2000000], ascending, whole fp32 elements. Raises: argparse.ArgumentTypeError."""
    try:
        sizes = sorted({int(float(word)) // 4 * 4 for word in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 4:
        raise argparse.ArgumentTypeError(f"{text!r}: give bytes, such as 1e3,1e6; an element has 4")
    return sizes


def tune(job: Job, options: argparse.Namespace, *, wire: str) -> tuple[Times, HybridTable]:
    """Measure all algorithms' times and hybrid's table as `bigbatch comm tune` does, with less time. Collective."""
    times = measure_times(
        job.communicator.with_algorithm(DEFAULT_ALGORITHM, wire=make_wire(wire)),
        sizes_below(max(options.sizes)),
        dtype=torch.float32,
        seconds=options.tune_seconds,
    )
    table = make_table(times, beyond=DEFAULT_ALGORITHM)
    job.say(f"hybrid over {wire}, from sizes up to {max(times, default=0):,} bytes: {table}")
    return times, table


def measure_size(
    job: Job, entries: Mapping[str, Entry], tensors: Mapping[str, Tensor], *, size: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure a row for each contestant: of its repetitions, or of its first sum if there is no time for more."""
    parts = {memory: tensor_N[: size // 4] for memory, tensor_N in tensors.items()}
    checked = {name: check(job, name, entry, parts[entry.memory]) for name, entry in entries.items()}
    first = {name: seconds for name, (seconds, _) in checked.items()}
    chosen = within_time(first, seconds=options.seconds_per_size, repetitions=options.repetitions)
    loops = {name: max(1, min(MAX_LOOPS, int(LOOP_SECONDS / first[name]))) for name in entries}
    for part_N in parts.values():
        part_N.zero_()
    contestants = [
        make_contestant(name, entries[name], parts[entries[name].memory], loops=loops[name]) for name in chosen
    ]
    measured = take_turns(job, contestants, repetitions=options.repetitions)
    if any(job.gather(any(bool(part_N.any()) for part_N in parts.values()))):
        raise CommError(f"sums of zeros are not zero any more, at {size} bytes: one of {', '.join(chosen)} is wrong")
    wrong = {name: num_wrong for name, (_, num_wrong) in checked.items()}
    return [
        {
            "size": size,
            "contestant": name,
            "is_ours": entries[name].memory != "plain",
            "wire": entries[name].wire,
            "num_wrong": wrong[name],
            **(
                describe_repetitions(measured[name], loops=loops[name])
                if name in measured
                else {"seconds": {"n": 1, "median": first[name], "min": first[name], "max": first[name]}}
            ),
        }
        for name in entries
    ]


def make_contestant(name: str, entry: Entry, part_N: Tensor, *, loops: int) -> Contestant:
    """Make a contestant that sums the same tensor loops times in a row."""

    def work() -> None:
        for _ in range(loops):
            entry.sum_(part_N)

    return Contestant(name, work, enter=partial(entry.enter, part_N), leave=entry.leave, round=entry.round)


def check(job: Job, name: str, entry: Entry, part_N: Tensor) -> tuple[float, int]:
    """Check the first sum, of numbers with an exact sum; return its seconds and all wrong elements. Collective."""
    world_size = job.communicator.world_size
    limit = limit_of(getattr(torch, entry.wire))
    contestant = make_contestant(name, entry, part_N, loops=1)
    pattern = rank_pattern(job.rank, world_size, limit=limit)
    contestant = replace(contestant, prepare=lambda: fill_(part_N, pattern), round=1)
    seconds = take_turns(job, [contestant], repetitions=1)[name][0].seconds
    return seconds, sum(job.gather(count_different(part_N, expected_pattern(world_size, limit=limit))))


def within_time(first: Mapping[str, float], *, seconds: float, repetitions: int) -> list[str]:
    """Choose the contestants, in order, if their repetitions fit into the time; the first two always."""
    chosen: list[str] = []
    left = seconds
    for name in sorted(first, key=CONTESTANTS.index):
        needed = repetitions * max(first[name], LOOP_SECONDS)
        if len(chosen) < 2 or needed <= left:
            chosen.append(name)
            left -= needed
    return chosen


def without_hopeless(entries: Mapping[str, Entry], rows: Sequence[Mapping[str, Any]], *, size: int) -> dict[str, Entry]:
    """Return the contestants for the next size: without ours that were far slower than our best at this one."""
    ours = {row["contestant"]: row["seconds"]["median"] for row in rows if row["is_ours"]}
    full = [row["seconds"]["median"] for row in rows if row["is_ours"] and row["wire"] == "float32"]
    if size < HOPELESS_BYTES or not full:
        return dict(entries)
    worst = HOPELESS_RATIO * min(full)
    return {name: entry for name, entry in entries.items() if ours.get(name, 0.0) <= worst}


def with_limit(
    rows: Sequence[Mapping[str, Any]], *, num_nodes: int, goodput: Sequence[float | None]
) -> list[dict[str, Any]]:
    """Make rows with their share of the limit, by the higher measured goodput, which is the stricter limit."""
    best = links.best_goodput(goodput)
    if best is None or num_nodes < 2:
        return [dict(row) | {"limit_share": None} for row in rows]
    narrow = {"float32": 1.0, "float16": 0.5}
    return [
        dict(row)
        | {
            "limit_share": links.limit_seconds(row["size"] * narrow[row["wire"]], num_nodes=num_nodes, goodput=best)
            / row["seconds"]["median"]
        }
        for row in rows
    ]


def show(rows: Sequence[Mapping[str, Any]]) -> str:
    times = ", ".join(
        f"{row['contestant']} {1e3 * row['seconds']['median']:.4g}{'' if row['seconds']['n'] > 1 else ' (once)'}"
        for row in rows
    )
    wrong = sum(row["num_wrong"] for row in rows)
    return f"{rows[0]['size']:>11,} bytes, ms: {times}" + (f"; {wrong} WRONG" if wrong else "")


if __name__ == "__main__":
    main()
