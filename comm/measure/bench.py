"""`bigbatch comm bench`, run by every rank of a job: time all-reduces, or verify their sums with --verify."""

import argparse
import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch

from bigbatch.comm.algorithms import ALGORITHMS
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import BACKENDS, BUFFERS, REDUCE_DTYPES, WIRE_DTYPES, connect
from bigbatch.comm.measure import figures
from bigbatch.comm.measure.exactness import PRECISIONS
from bigbatch.comm.measure.figures import plot_sweep
from bigbatch.comm.measure.hangs import HungError, limited
from bigbatch.comm.measure.report import BenchReport, groups_text
from bigbatch.comm.measure.timing import Effort, measure_links, time_sums
from bigbatch.comm.measure.verify import WORKING_COPIES, make_sums, verify_sizes
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.tuning.conditions import gather_cluster, gather_conditions
from bigbatch.comm.tuning.tuned import read_tuned
from bigbatch.errors import CommError
from bigbatch.exit_codes import FAILED
from bigbatch.numbers import decimal, whole
from bigbatch.paths import as_path
from bigbatch.words import count

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
TIMING_COPIES = 3
"""Memory as a multiple of the tensor: the tensor itself, and twice as much for the algorithms."""
LINK_SECONDS = 4.0
"""Time for measuring the links, from which their limit is computed."""

TIMING_OPTIONS = {
    "min_bytes": "1K",
    "max_bytes": "256M",
    "factor": 4,
    "repetitions": 20,
    "dtype": "float32",
    "table": None,
    "wire_dtype": None,
    "seconds_per_size": 20.0,
    "link_gbit": "measured",
    "plot": None,
}
VERIFY_OPTIONS = {
    "min_bytes": "4K",
    "max_bytes": "16M",
    "factor": 64,
    "repetitions": 5,
    "precisions": "all",
    "pieces": "1,3",
    "seed": 0,
}
"""Options of timing and of --verify, and their defaults."""


def main(argv: Sequence[str]) -> int:
    """Run the measurement of argv; return 0, or 1 if a sum was wrong. Collective over the job's ranks.

    Raises: UserError for invalid arguments, and if the ranks cannot meet.
    """
    arguments = _parser().parse_args(argv)
    counts = check_options(arguments)
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
    conditions = gather_conditions(communicator)
    if tuned:
        tuned.require_cluster(gather_cluster(communicator), path=arguments.table)
    copies = WORKING_COPIES if arguments.verify else TIMING_COPIES
    require_memory(max(counts) * figures.ELEMENT_BYTES[arguments.dtype], communicator, copies=copies)
    available = (*communicator.algorithms, *(("hybrid",) if tuned else ()))
    where = f"with backend {communicator.backend.name}"
    names = figures.choose_algorithms(arguments.algorithms, available=available, where=where)
    report = BenchReport(conditions, communicator, command=command, output=arguments.output)
    if arguments.verify:
        is_right = verify_sizes(
            counts,
            make_sums(communicator, names, arguments.precisions, reduce_dtype=arguments.reduce_dtype),
            report,
            pieces=arguments.pieces,
            repetitions=arguments.repetitions,
            seed=arguments.seed,
        )
    else:
        table = tuned.table if tuned else None
        contestants = {name: communicator.with_algorithm(name, table=table) for name in names}
        is_right = _time_sizes(arguments, counts, contestants, report)
    communicator.close()
    report.close()
    return 0 if is_right else FAILED


def _time_sizes(
    arguments: argparse.Namespace, counts: Sequence[int], contestants: Mapping[str, Communicator], report: BenchReport
) -> bool:
    """Time each number of elements by each algorithm; return whether all sums were right. Collective.

    Raises: CommError if all algorithms hang.
    """
    communicator, conditions = report.communicator, report.conditions
    limit, source = _find_limit(arguments.link_gbit, communicator)
    tensor_N = communicator.allocate(max(counts), getattr(torch, arguments.dtype))
    shares = {name: figures.wire_share(each, tensor_N) for name, each in contestants.items()}
    if limit:
        limit = replace(limit, wire_bytes_per_byte=min(shares.values()))
    lines = (
        f"wire {conditions.wire_dtype or arguments.dtype}",
        "time: median of n repetitions, each that of the slowest rank; * is the fastest of its size",
        "algbw = size / time; busbw = algbw * 2(ranks-1)/ranks; GB = 1e9 bytes",
        figures.explain_limit(limit, num_nodes=communicator.topology.num_nodes, source=source, shares=shares),
    )
    record = {"limit": asdict(limit) if limit else None}
    report.open(record, lines, columns=figures.COLUMNS, plot=arguments.plot)
    effort = Effort(arguments.repetitions, arguments.seconds_per_size)
    rows: list[figures.BenchRow] = []
    left = list(counts)
    while left:
        part_N = tensor_N[: left[0]]
        size = figures.show_bytes(part_N.nbytes)
        report.working_on(f"{size} by {', '.join(contestants)}")
        try:
            with limited(communicator):
                sums = time_sums(part_N, contestants, effort=effort, label=f"{size} all-reduce")
        except HungError as hung:
            report.working_on("")
            report.print(f"# {hung}")
            others = {name: each.table for name, each in contestants.items() if name != hung.algorithm}
            if not others:
                raise CommError(f"{hung.algorithm} hangs, and no other all-reduce is left to measure") from None
            contestants = {name: communicator.with_algorithm(name, table=table) for name, table in others.items()}
            tensor_N = communicator.allocate(max(counts), tensor_N.dtype)  # the hung sum may use the old one
            continue
        left.pop(0)
        new = [figures.make_row(each, part_N, contestants[name], limit=limit) for name, each in sums.items()]
        report.working_on("")
        for line, row in zip(figures.show_rows(new), new, strict=True):
            report.print(line)
            report.write({"kind": "row", **asdict(row)})
        rows += new
    num_wrong = sum(row.num_wrong for row in rows)
    report.print(f"# wrong values: {num_wrong}")
    if arguments.plot and communicator.rank == 0:
        job = f"{count(len(conditions.hosts), 'rank')}, {groups_text(conditions)} per node; {conditions.backend}"
        caption = (
            f"{conditions.device}; torch {conditions.torch}, bigbatch {conditions.bigbatch} "
            f"({conditions.commit or 'commit unknown'}), {conditions.kernel}; {conditions.date}"
        )
        title = f"All-reduce of {arguments.dtype}, {job}"
        plot_sweep(rows, arguments.plot, limit=limit, title=title, caption=caption)
        report.print(f"# plot: {arguments.plot}")
    return num_wrong == 0


def check_options(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Check options before the ranks meet, convert their texts, and return the numbers of elements.

    Raises: CommError naming the option and a legal value.
    """
    _set_defaults(arguments)
    counts = figures.sweep_counts(
        min_bytes=figures.parse_bytes(arguments.min_bytes, option="--min-bytes"),
        max_bytes=figures.parse_bytes(arguments.max_bytes, option="--max-bytes"),
        factor=arguments.factor,
        dtype=arguments.dtype,
    )
    for option, value, least in (("repetitions", arguments.repetitions, 2), ("group-size", arguments.group_size, 1)):
        if value is not None and value < least:
            raise CommError(f"--{option} {value} is too few; give at least {least}")
    lengths = {"seconds-per-size": arguments.seconds_per_size, "timeout-seconds": arguments.timeout_seconds}
    for option, value in lengths.items():
        if not 0 < value < float("inf"):
            raise CommError(f"--{option} {value:g} must be a positive number of seconds")
    if arguments.plot and arguments.plot.suffix not in PLOT_SUFFIXES:
        raise CommError(f"--plot {arguments.plot}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    arguments.link_gbit = _parse_gbit(arguments.link_gbit)
    if arguments.precisions == "all":
        arguments.precisions = None
    else:
        names = tuple(dict.fromkeys(arguments.precisions.split(",")))
        if unknown := [name for name in names if name not in PRECISIONS]:
            raise CommError(f"--precisions: {unknown[0]!r} is unknown; choose among {', '.join(PRECISIONS)}, or all")
        arguments.precisions = [PRECISIONS[name] for name in names]
    pieces = arguments.pieces.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) for word in pieces):
        raise CommError(f"--pieces {arguments.pieces!r} is not a list of whole numbers; give one such as 1 or 1,3")
    arguments.pieces = tuple(dict.fromkeys(map(int, pieces)))
    if arguments.verify:
        if "hybrid" in arguments.algorithms.split(","):
            raise CommError("--algorithms hybrid is one of the others at each size: verify those by their names")
        figures.choose_algorithms(arguments.algorithms, available=ALGORITHMS, where="with any backend")
    return counts


def _set_defaults(arguments: argparse.Namespace) -> None:
    """Set omitted options to their defaults. Raises: CommError for an option of timing with --verify, or vice versa."""
    own, others = (VERIFY_OPTIONS, TIMING_OPTIONS) if arguments.verify else (TIMING_OPTIONS, VERIFY_OPTIONS)
    for name in others.keys() - own.keys():
        if getattr(arguments, name) is not None:
            which = "has no effect with --verify" if arguments.verify else "is for --verify"
            raise CommError(f"--{name.replace('_', '-')} {which}: leave one of the two out")
    for name, value in {**others, **own}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def _parse_gbit(text: str) -> float | None:
    if text == "measured":
        return None
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise CommError(f"--link-gbit {text!r} is not a bandwidth; give a link's Gbit/s, such as 100, or measured")


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


def _find_limit(link_gbit: float | None, communicator: Communicator) -> tuple[figures.Limit | None, str]:
    """Return the links' limit for the last column, and the origin of the bandwidth. Collective."""
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
        longest = figures.show_bytes(across.times[-1][0])
        bytes_per_second, source = across.best_bytes_per_second, f"measured: the best of messages of {longest} bytes"
    return figures.Limit(num_nodes, bytes_per_second), source


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch comm bench",
        usage="bigbatch comm bench [--verify] [OPTION ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Time the all-reduce of tensors of growing size by every algorithm, side by side, and count wrong values. Runs as
one rank of a job.

With --verify, compare the sums with exact ones instead. Every rank draws numbers of either sign from 2**-31 to 1,
by a seed, its rank and the element, so that any rank knows those of the others. Each algorithm sums them as fp32,
over wires of bf16 and fp16, and as the whole numbers of run.reproducible (grid), whole and cut into pieces as
fusion plans cut gradients, several times. Floating-point sums depend on their order, so algorithms may differ,
within a bound that grows with the number of ranks. A sum beyond its bound, one that does not repeat itself, and
one that ranks hold differently are faults: each is named by algorithm, size, rank and element, and the exit code
is 1.""",
        epilog="example: bigbatch launch mpirun --ranks 4 -- comm bench --max-bytes 16M --output bench.jsonl",
    )
    add = parser.add_argument

    def add_option(option: str, help_text: str, **how: object) -> None:
        """Add an option with a default that depends on --verify."""
        name = option.removeprefix("--").replace("-", "_")
        defaults = dict.fromkeys(each[name] for each in (TIMING_OPTIONS, VERIFY_OPTIONS) if each.get(name) is not None)
        shown = f" (default: {', with --verify '.join(map(str, defaults))})" if defaults else ""
        add(option, help=help_text + shown, **how)  # type: ignore[arg-type]

    add("--verify", action="store_true", help="compare with exact sums, rather than time")
    add_option("--min-bytes", "smallest tensor; K, M and G are powers of 1024")
    add_option("--max-bytes", "largest tensor")
    add_option("--factor", "ratio of each size to the one before", type=whole)
    add("--algorithms", default="all", help="names such as ring,native (default: %(default)s that run here)")
    add_option("--repetitions", "repetitions of each algorithm and size, at most", type=whole)
    add("--backend", choices=BACKENDS, default="auto", help="transport (default: %(default)s)")
    add("--reduce-dtype", choices=REDUCE_DTYPES, default="fp32", help="half-precision sums (default: %(default)s)")
    add("--group-size", type=whole, help="ranks per node group (default: all of a host)")
    add("--buffers", choices=BUFFERS, default="torch", help="memory of the tensors, with NCCL (default: %(default)s)")
    add("--interface", help="network interface, such as eth0 (default: that of the route to the other ranks)")
    add("--timeout-seconds", type=decimal, default=60.0, help="limit for a silent peer (default: %(default)s)")
    add("--output", type=as_path, metavar="FILE.jsonl", help="a line of conditions, then a line per row")
    timing = parser.add_argument_group("of times")
    add = timing.add_argument
    add_option("--dtype", "of the tensors", choices=tuple(figures.ELEMENT_BYTES))
    add_option("--table", "file of bigbatch comm tune: measures hybrid, too", type=as_path, metavar="FILE")
    wire_dtypes = tuple(name for name in WIRE_DTYPES if name)
    add_option("--wire-dtype", "precision between ranks (default: the tensors')", choices=wire_dtypes)
    add_option("--seconds-per-size", "fewer repetitions where they would take longer", type=decimal)
    add_option("--link-gbit", "a node's link in Gbit/s", metavar="GBIT")
    add_option("--plot", "bus bandwidth and time by size", type=as_path, metavar="FILE.png")
    add = parser.add_argument_group("of --verify").add_argument
    add_option("--precisions", f"of {','.join(PRECISIONS)}")
    add_option("--pieces", "numbers of pieces to cut a tensor into")
    add_option("--seed", "draws other numbers", type=whole)
    return parser
