"""`bigbatch comm bench`, run by every rank of a job: time all-reduces, or verify their sums with --verify."""

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from bigbatch.comm.algorithms.by_name import ALGORITHMS
from bigbatch.comm.algorithms.hybrid import HybridTable
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import BACKENDS, BUFFERS, REDUCE_DTYPES, WIRE_DTYPES, connect
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.tuning.cluster import gather_cluster
from bigbatch.comm.tuning.conditions import gather_conditions
from bigbatch.comm.tuning.tuned import read_tuned
from bigbatch.errors import FAILED, CommError
from bigbatch.paths import as_path
from bigbatch.tools.measure import figures
from bigbatch.tools.measure.hangs import HungError, limited
from bigbatch.tools.measure.report import BenchReport
from bigbatch.tools.measure.timing import TimeBudget, measure_links, time_sums
from bigbatch.tools.measure.verify import WORKING_COPIES, verify_sizes
from bigbatch.words import at_least, count, positive, whole

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
TIMING_COPIES = 3
"""Memory as a multiple of the tensor: the tensor itself, and twice as much for the algorithms."""
LINK_SECONDS = 4.0
"""Time for measuring the links, from which their limit is computed."""


def main(argv: Sequence[str]) -> int:
    """Run the measurement of argv; return 0, or 1 if a sum was wrong. Collective over the job's ranks.

    Raises: UserError for invalid arguments, and if the ranks cannot meet.
    """
    arguments = parse(argv)
    if arguments.verify and read_process_env().world_size == 1:
        raise CommError(
            "--verify needs several ranks, and this job has one: start it by bigbatch launch mpirun "
            "--ranks 4 -- comm bench --verify"
        )
    tuned = read_tuned(arguments.table) if arguments.table else None
    try:
        communicator = connect(
            backend=arguments.backend,
            group_size=arguments.group_size,
            warn_seconds=arguments.timeout_seconds,  # a large sum may take long
            timeout_seconds=arguments.timeout_seconds,
            interface=arguments.interface,
            buffers=arguments.buffers,
            wire_dtype=arguments.wire_dtype,
            reduce_dtype=arguments.reduce_dtype,
        )
    except ValueError as error:
        raise CommError(str(error)) from error
    command = shlex.join(["bigbatch", "comm", "bench", *argv])
    communicator.agree("the command line", command)
    report = BenchReport(
        gather_conditions(communicator), communicator, command=command, output=arguments.output, plot=arguments.plot
    )
    if tuned:
        tuned.require_cluster(gather_cluster(communicator), path=arguments.table)
    copies = WORKING_COPIES if arguments.verify else TIMING_COPIES
    require_memory(max(arguments.counts) * figures.ELEMENT_BYTES[arguments.dtype], communicator, copies=copies)
    available = (*communicator.transport.algorithms, *(("hybrid",) if tuned else ()))
    where = f"with backend {communicator.transport.backend.name}"
    names = figures.choose_algorithms(arguments.algorithms, available=available, where=where)
    if arguments.verify:
        contestants = {name: communicator.with_algorithm(name) for name in names}
        is_right = verify_sizes(
            arguments.counts, contestants, report, repetitions=arguments.repetitions, seed=arguments.seed
        )
    else:
        is_right = _time_sizes(arguments, names, tuned.table if tuned else None, report)
    communicator.close()
    report.close()
    return 0 if is_right else FAILED


def _time_sizes(
    arguments: argparse.Namespace, names: Sequence[str], table: HybridTable | None, report: BenchReport
) -> bool:
    """Time each number of elements by each algorithm; return whether all sums were right. Collective.

    Raises: CommError if all algorithms hang.
    """
    communicator = report.communicator
    limit = _find_limit(arguments.link_gbit, communicator)
    contestants = {name: communicator.with_algorithm(name, table=table) for name in names}
    tensor_N = communicator.allocate(max(arguments.counts), getattr(torch, arguments.dtype))
    shares = {name: figures.wire_share(each, tensor_N) for name, each in contestants.items()}
    if limit:
        limit = replace(limit, wire_bytes_per_byte=min(shares.values()))
    lines = (
        f"wire {report.conditions.wire_dtype or arguments.dtype}",
        "time: median of n repetitions, each that of the slowest rank; * is the fastest of its size",
        "algbw = size / time; busbw = algbw * 2(ranks-1)/ranks; GB = 1e9 bytes",
        figures.explain_limit(limit, num_nodes=communicator.connection.topology.num_nodes, shares=shares),
    )
    report.open({"limit": limit and asdict(limit)}, lines, columns=figures.COLUMNS)
    budget = TimeBudget(arguments.repetitions, arguments.seconds_per_size)
    rows: list[figures.BenchRow] = []
    left = list(arguments.counts)
    while left:
        part_N = tensor_N[: left[0]]
        size = figures.show_bytes(part_N.nbytes)
        report.working_on(f"{size} by {', '.join(contestants)}")
        try:
            with limited(communicator.connection):
                sums = time_sums(part_N, contestants, budget=budget, label=f"{size} all-reduce")
        except HungError as hung:
            report.print(f"# {hung}")
            contestants = hung.reconnect(contestants)
            if not contestants:
                raise CommError(f"{hung.algorithm} hangs, and no other all-reduce is left to measure") from None
            tensor_N = communicator.allocate(max(arguments.counts), tensor_N.dtype)  # the hung sum may use the old one
            continue
        left.pop(0)
        new = [figures.make_row(each, part_N, contestants[name], limit=limit) for name, each in sums.items()]
        report.rows(new, shown=figures.mark_fastest(new))
        rows += new
    num_wrong = sum(row.num_wrong for row in rows)
    report.print(f"# wrong values: {num_wrong}")
    if arguments.plot and communicator.rank == 0:
        title, caption = report.describe(arguments.dtype)
        figures.plot_sweep(rows, arguments.plot, limit=limit, title=title, caption=caption)
        report.print(f"# plot: {arguments.plot}")
    return num_wrong == 0


def require_memory(num_bytes: int, communicator: Communicator, *, copies: int) -> None:
    """Raise CommError if that many copies of --max-bytes do not fit into the memory of the GPU or host."""
    if communicator.device.type == "cuda":
        memory, share = torch.cuda.mem_get_info(communicator.device)[1], 1
    else:
        memory, share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), communicator.env.local_size
    room = memory // (share * copies)
    if num_bytes > room:
        times = "twice" if copies == 3 else f"{copies - 1} times"
        raise CommError(
            f"--max-bytes: {figures.show_bytes(num_bytes)} bytes for each of {count(share, 'rank')}, and as much again "
            f"{times} to work with, do not fit into the {memory / 2**30:.0f} GiB of {communicator.env.host}; give at "
            f"most {figures.show_bytes(1 << (room.bit_length() - 1))}"
        )


def _find_limit(link_gbit: float | None, communicator: Communicator) -> figures.Limit | None:
    """Return the links' limit for the last column; None if no link limits the ranks, or none can be measured.

    Collective. Raises: CommError for a link of one node.
    """
    num_nodes = communicator.connection.topology.num_nodes
    if link_gbit and num_nodes == 1:
        raise CommError(f"--link-gbit {link_gbit:g}: all ranks are on one node, so no link limits them; leave it out")
    if num_nodes == 1:
        return None
    if link_gbit:
        return figures.Limit(num_nodes, link_gbit * 1e9 / 8, "as given")
    across = measure_links(communicator, seconds=LINK_SECONDS).across
    if across is None:
        return None
    longest = figures.show_bytes(across.times[-1][0])
    return figures.Limit(num_nodes, across.best_bytes_per_second, f"measured: the best of messages of {longest} bytes")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options, before the ranks meet; add counts, the numbers of elements.

    Raises: CommError naming the option and a legal value; SystemExit for a text of the wrong form.
    """
    verify = "--verify" in argv
    arguments = (_verify_parser() if verify else _timing_parser()).parse_args(argv)
    arguments.counts = figures.sweep_counts(
        arguments.min_bytes, arguments.max_bytes, factor=arguments.factor, dtype=arguments.dtype
    )
    if verify:
        if not 0 <= arguments.seed < 1 << 63:
            raise CommError(f"--seed {arguments.seed}: give 0 or more, and below 2**63")
        if "hybrid" in arguments.algorithms.split(","):
            raise CommError("--algorithms hybrid is one of the others at each size: verify those by their names")
        figures.choose_algorithms(arguments.algorithms, available=tuple(ALGORITHMS), where="with any backend")
    return arguments


def _timing_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "bigbatch comm bench",
        "Time the all-reduce of tensors of growing size by every algorithm, side by side, and count wrong values. "
        "With --verify, compare the sums with exact ones instead; --verify --help lists its options.",
        min_bytes="1K",
        max_bytes="256M",
        factor=4,
        repetitions=20,
    )
    add = parser.add_argument
    add(
        "--dtype", choices=tuple(figures.ELEMENT_BYTES), default="float32", help="of the tensors (default: %(default)s)"
    )
    add("--table", type=as_path, metavar="FILE", help="file of bigbatch comm tune: measures hybrid, too")
    add("--seconds-per-size", type=positive, default=20.0, help="limit of the repetitions (default: %(default)s)")
    add("--link-gbit", type=_link, metavar="GBIT", help="a node's link in Gbit/s (default: measured)")
    add("--plot", type=_plot, metavar="FILE.png", help="bus bandwidth and time by size")
    return parser


def _verify_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "bigbatch comm bench --verify",
        """\
Every rank sums a multiple of the same random numbers, so that each knows the exact sum. Floating-point sums depend on
their order, so algorithms may differ, within a bound that grows with the number of ranks. A sum beyond its bound, one
that does not repeat itself, and one that ranks hold differently are faults: each is named by algorithm, size and rank,
and the exit code is 1.""",
        min_bytes="4K",
        max_bytes="16M",
        factor=64,
        repetitions=5,
    )
    parser.add_argument("--seed", type=whole, default=0, help="draws other numbers (default: %(default)s)")
    parser.set_defaults(dtype="float32", table=None, plot=None)
    return parser


def _parser(prog: str, description: str, **defaults: object) -> argparse.ArgumentParser:
    """Return a parser of the options that timing and --verify share; they differ in these defaults."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="bigbatch comm bench [--verify] [OPTION ...]",
        description=description + " Runs as one rank of a job.",
        epilog="example: bigbatch launch mpirun --ranks 4 -- comm bench --max-bytes 16M --output bench.jsonl",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--verify", action="store_true", help="compare with exact sums, rather than time")
    add("--min-bytes", type=figures.parse_bytes, help="smallest tensor; K, M, G: powers of 1024 (default: %(default)s)")
    add("--max-bytes", type=figures.parse_bytes, help="largest tensor (default: %(default)s)")
    add("--factor", type=at_least(2), help="ratio of each size to the one before (default: %(default)s)")
    add("--algorithms", default="all", help="names such as ring,native (default: %(default)s that run here)")
    add("--repetitions", type=at_least(2), help="of each algorithm and size, at most (default: %(default)s)")
    add("--backend", choices=BACKENDS, default="auto", help="transport (default: %(default)s)")
    wire_dtypes = tuple(name for name in WIRE_DTYPES if name)
    add("--wire-dtype", choices=wire_dtypes, help="precision between ranks (default: the tensors')")
    add("--reduce-dtype", choices=REDUCE_DTYPES, default="fp32", help="half-precision sums (default: %(default)s)")
    add("--group-size", type=at_least(1), help="ranks per node group (default: all of a host)")
    add("--buffers", choices=BUFFERS, default="torch", help="memory of the tensors, with NCCL (default: %(default)s)")
    add("--interface", help="network interface, such as eth0 (default: that of the route to the other ranks)")
    add("--timeout-seconds", type=positive, default=60.0, help="limit for a silent peer (default: %(default)s)")
    add("--output", type=as_path, metavar="FILE.jsonl", help="a line of conditions, then a line per row")
    parser.set_defaults(**defaults)
    return parser


def _link(text: str) -> float | None:
    return None if text == "measured" else positive(text)


def _plot(text: str) -> Path:
    path = as_path(text)
    if path.suffix not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    return path
