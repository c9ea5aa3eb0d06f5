"""`bigbatch comm bench`, run by every rank of a job."""

import argparse
import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bigbatch.comm.algorithms import travelling_dtype
from bigbatch.comm.algorithms.hybrid import HybridTable
from bigbatch.comm.bench import figures as bench
from bigbatch.comm.bench.job import add_connection_options, connect_as_told, require_memory, require_numbers
from bigbatch.comm.bench.report import SweepReport
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import WIRE_DTYPES
from bigbatch.comm.tuning.conditions import gather_conditions
from bigbatch.comm.tuning.measure import Effort, measure_links, time_sums
from bigbatch.comm.tuning.tuned import read_tuned
from bigbatch.errors import CommError
from bigbatch.numbers import decimal, whole
from bigbatch.paths import as_path

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
WORKING_COPIES = 3
"""The tensor, and as much again twice for what algorithms keep under way."""

LINK_SECONDS = 4.0
"""How long links are measured for their limit."""


def main(argv: Sequence[str]) -> int:
    """Sweep the sizes that argv names; return 0, or 1 where a sum came out wrong. Collective over the job's ranks.

    Raises: UserError for arguments that make no sense, and where ranks cannot meet.
    """
    arguments = _parser().parse_args(argv)
    sweep = make_sweep(arguments)
    tuned = read_tuned(arguments.table) if arguments.table else None
    communicator = connect_as_told(arguments, wire_dtype=arguments.wire_dtype)
    command = shlex.join(["bigbatch", "comm", "bench", *argv])
    communicator.agree("the command line", command)
    conditions = gather_conditions(communicator)
    if tuned:
        tuned.require_cluster(conditions.cluster, path=arguments.table)
    contestants = _contestants(arguments.algorithms, communicator, table=tuned.table if tuned else None)
    require_memory(max(sweep.counts) * bench.ELEMENT_BYTES[sweep.dtype], communicator, copies=WORKING_COPIES)
    limit, source = _find_limit(sweep.link_gbit, communicator)
    tensor_N = communicator.allocate(max(sweep.counts), getattr(torch, sweep.dtype))
    shares = {name: wire_share(each, tensor_N) for name, each in contestants.items()}
    if limit:
        limit = replace(limit, wire_bytes_per_byte=min(shares.values()))
    report = SweepReport(
        conditions,
        limit,
        dtype=sweep.dtype,
        output=sweep.output,
        plot=sweep.plot,
        is_first=communicator.rank == 0,
        on_terminal=communicator.env.terminal_columns is not None,
    )
    problem = communicator.gather_text(report.open(command))[0]
    if problem:
        raise CommError(problem)
    report.head(bench.explain_limit(limit, num_nodes=communicator.topology.num_nodes, source=source, shares=shares))
    for count in sweep.counts:
        report.working_on(f"{bench.show_bytes(tensor_N[:count].nbytes)} by {', '.join(contestants)}")
        label = f"{bench.show_bytes(tensor_N[:count].nbytes)} all-reduce"
        sums = time_sums(tensor_N[:count], contestants, effort=sweep.effort, label=label)
        report.add(
            [
                bench.make_row(
                    each.measured,
                    count=count,
                    dtype=sweep.dtype,
                    algorithm=name,
                    num_wrong=each.num_wrong,
                    world_size=communicator.world_size,
                    limit=limit and replace(limit, wire_bytes_per_byte=wire_share(contestants[name], tensor_N[:count])),
                )
                for name, each in sums.items()
            ]
        )
    communicator.close()
    report.close()
    return 1 if report.num_wrong else 0


@dataclass(frozen=True)
class SizeSweep:
    """Says what to measure, checked."""

    counts: tuple[int, ...]
    dtype: str
    effort: Effort
    link_gbit: float | None
    """None: to be measured."""
    output: Path | None
    plot: Path | None


def make_sweep(arguments: argparse.Namespace) -> SizeSweep:
    """Check what can be checked before ranks meet. Raises: CommError naming the option and a legal value."""
    counts = bench.sweep_counts(
        min_bytes=bench.parse_bytes(arguments.min_bytes, option="--min-bytes"),
        max_bytes=bench.parse_bytes(arguments.max_bytes, option="--max-bytes"),
        factor=arguments.factor,
        dtype=arguments.dtype,
    )
    require_numbers(
        arguments,
        least={"--repetitions": 2, "--group-size": 1},
        seconds=("--seconds-per-size", "--timeout-seconds"),
    )
    plot = arguments.plot
    if plot and plot.suffix not in PLOT_SUFFIXES:
        raise CommError(f"--plot {plot}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    return SizeSweep(
        counts=counts,
        dtype=arguments.dtype,
        effort=Effort(arguments.repetitions, arguments.seconds_per_size),
        link_gbit=_parse_gbit(arguments.link_gbit),
        output=arguments.output,
        plot=plot,
    )


def _parse_gbit(text: str) -> float | None:
    if text == "measured":
        return None
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise CommError(f"--link-gbit {text!r} is no bandwidth; give a link's Gbit/s, such as 100, or measured")


def _contestants(
    algorithms: str, communicator: Communicator, *, table: HybridTable | None
) -> Mapping[str, Communicator]:
    """Make one communicator per algorithm that takes part. Collective."""
    available = (*communicator.algorithms, *(("hybrid",) if table else ()))
    where = f"on {communicator.backend.name}"
    names = bench.choose_algorithms(algorithms, available=available, where=where)
    return {name: communicator.with_algorithm(name, table=table) for name in names}


def wire_share(communicator: Communicator, tensor_N: torch.Tensor) -> float:
    """Return the bytes that travel per byte of this tensor."""
    algorithm = communicator.algorithm_for(tensor_N)
    dtype = travelling_dtype(algorithm, tensor_N, wire=communicator.wire, backend=communicator.backend)
    return dtype.itemsize / tensor_N.dtype.itemsize


def _find_limit(link_gbit: float | None, communicator: Communicator) -> tuple[bench.Limit | None, str]:
    """Find what the last column is a share of, and where that figure is from. Collective."""
    num_nodes = communicator.topology.num_nodes
    if link_gbit and num_nodes == 1:
        raise CommError(f"--link-gbit {link_gbit:g}: all ranks are on one node, so no link limits them; leave it out")
    if num_nodes == 1:
        return None, ""
    if link_gbit:
        bytes_per_second, source = link_gbit * 1e9 / 8, "as given"
    else:
        across = measure_links(communicator, seconds=LINK_SECONDS).across
        if across is None:
            return None, ""
        longest = bench.show_bytes(across.times[-1][0])
        bytes_per_second, source = across.best_bytes_per_second, f"measured: the best of messages of {longest} bytes"
    return bench.Limit(num_nodes, bytes_per_second), source


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch comm bench",
        usage="bigbatch comm bench [OPTION ...]",
        description="Time the all-reduce of tensors of growing size by every algorithm, side by side, and count wrong "
        "values. Runs as one rank of a job.",
        epilog="example: bigbatch launch mpirun --ranks 4 -- comm bench --max-bytes 16M --output bench.jsonl",
    )
    add = parser.add_argument
    add("--min-bytes", default="1K", help="smallest tensor; K, M and G are powers of 1024 (default: %(default)s)")
    add("--max-bytes", default="256M", help="largest tensor (default: %(default)s)")
    add("--factor", type=whole, default=4, help="from one size to the next (default: %(default)s)")
    add("--dtype", choices=tuple(bench.ELEMENT_BYTES), default="float32", help="of the tensors (default: %(default)s)")
    add("--algorithms", default="all", help="such as ring,native (default: %(default)s that run here)")
    add("--table", type=as_path, metavar="FILE", help="file of bigbatch comm tune: measures hybrid, too")
    wire_dtypes = tuple(name for name in WIRE_DTYPES if name)
    add("--wire-dtype", choices=wire_dtypes, help="precision between ranks (default: that of the tensors)")
    add_connection_options(parser)
    add(
        "--repetitions",
        type=whole,
        default=20,
        help="of each algorithm and size, at most (default: %(default)s)",
    )
    add(
        "--seconds-per-size",
        type=decimal,
        default=20.0,
        help="fewer repetitions where all algorithms together would take longer (default: %(default)s)",
    )
    add("--link-gbit", default="measured", metavar="GBIT", help="a node's link in Gbit/s (default: %(default)s)")
    add("--output", type=as_path, metavar="FILE.jsonl", help="a line of conditions, then a line per algorithm and size")
    add("--plot", type=as_path, metavar="FILE.png", help="bus bandwidth and time by size")
    return parser
