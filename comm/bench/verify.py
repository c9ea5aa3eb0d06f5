"""`bigbatch comm verify`, run by every rank of a job."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbatch.comm.algorithms import ALGORITHMS
from bigbatch.comm.bench import figures as bench
from bigbatch.comm.bench.exactness import PRECISIONS, Precision
from bigbatch.comm.bench.job import add_connection_options, connect_as_told, require_memory, require_numbers
from bigbatch.comm.bench.repeated_sums import DrawnSums
from bigbatch.comm.bench.verify_report import VerifyReport, make_rows
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import make_wire
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.tuning.conditions import gather_conditions
from bigbatch.errors import CommError
from bigbatch.exit_codes import FAILED
from bigbatch.numbers import whole
from bigbatch.paths import as_path

WORKING_COPIES = 17
"""In bytes of the fp32 numbers: they and their sums, int64 of twice the bytes, as much again for algorithms, float64
references, and what it takes to put numbers on the grid."""


@dataclass(frozen=True)
class Plan:
    """Says what to verify, checked."""

    counts: tuple[int, ...]
    algorithms: str
    precisions: tuple[Precision, ...] | None
    """None: all that the backend can sum."""
    pieces: tuple[int, ...]
    repetitions: int
    reduce_dtype: str
    seed: int
    output: Path | None

    def sums(self, communicator: Communicator) -> list[tuple[Precision, dict[str, Communicator]]]:
        """Make a communicator of each algorithm, for each precision. Collective. Raises: CommError for what is not."""
        where = f"on {communicator.backend.name}"
        names = bench.choose_algorithms(self.algorithms, available=communicator.algorithms, where=where)
        summable = communicator.backend.capabilities.dtypes
        chosen = [p for p in self.precisions or PRECISIONS.values() if self.precisions or p.travels_as in summable]
        for precision in chosen:
            if precision.travels_as not in summable:
                raise CommError(
                    f"--precisions: {communicator.backend.name} cannot sum {precision.name}; leave it out, or take "
                    "another --backend"
                )
        made = []
        for precision in chosen:
            wire = make_wire(precision.wire_dtype, reduce_dtype=self.reduce_dtype)
            made.append((precision, {name: communicator.with_algorithm(name, wire=wire) for name in names}))
        return made


def main(argv: Sequence[str]) -> int:
    """Verify the sums that argv names; return 0, or 1 where something was found. Collective over the job's ranks.

    Raises: UserError for arguments that make no sense, and where ranks cannot meet.
    """
    arguments = _parser().parse_args(argv)
    plan = make_plan(arguments)
    if read_process_env().world_size == 1:
        raise CommError(
            "comm verify: one rank has no other to sum with; start several, such as by bigbatch launch mpirun "
            "--ranks 4 -- comm verify"
        )
    communicator = connect_as_told(arguments)
    command = shlex.join(["bigbatch", "comm", "verify", *argv])
    communicator.agree("the command line", command)
    conditions = gather_conditions(communicator)
    require_memory(max(plan.counts) * 4, communicator, copies=WORKING_COPIES)
    report = VerifyReport(
        conditions,
        output=plan.output,
        seed=plan.seed,
        is_first=communicator.rank == 0,
        on_terminal=communicator.env.terminal_columns is not None,
    )
    sums = plan.sums(communicator)
    problem = communicator.gather_text(report.open(command))[0]
    if problem:
        raise CommError(problem)
    report.head()
    _verify(plan, communicator, sums, report)
    communicator.close()
    report.close()
    return FAILED if report.has_failed else 0


def _verify(
    plan: Plan,
    communicator: Communicator,
    sums: Sequence[tuple[Precision, dict[str, Communicator]]],
    report: VerifyReport,
) -> None:
    dtypes = {precision.dtype for precision, _ in sums}
    ordered = sorted(dtypes, key=str)  # as every rank allocates in the same order
    most = max(plan.counts) + 1
    memory = dict(zip(ordered, communicator.allocate_all([(most, dtype) for dtype in ordered]), strict=True))
    for count in plan.counts:
        size = bench.show_bytes(4 * count)
        report.working_on(f"{size}: drawing numbers")
        drawn = DrawnSums(communicator, count=count, seed=plan.seed)
        for precision, by_algorithm in sums:
            outcomes = {}
            for name, each in by_algorithm.items():
                for pieces in plan.pieces:
                    report.working_on(f"{size} in {precision.name} by {name}")
                    outcomes[name, pieces] = drawn.repeat(
                        each,
                        memory[precision.dtype][: count + 1],
                        precision=precision,
                        pieces=pieces,
                        repetitions=plan.repetitions,
                    )
            report.add(make_rows(outcomes, count=count, precision=precision.name, repetitions=plan.repetitions))


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Check what can be checked before ranks meet. Raises: CommError naming the option and a legal value."""
    counts = bench.sweep_counts(
        min_bytes=bench.parse_bytes(arguments.min_bytes, option="--min-bytes"),
        max_bytes=bench.parse_bytes(arguments.max_bytes, option="--max-bytes"),
        factor=arguments.factor,
        dtype="float32",
    )
    require_numbers(arguments, least={"--repetitions": 2, "--group-size": 1}, seconds=("--timeout-seconds",))
    if arguments.algorithms != "all":
        known = [name for name in ALGORITHMS if name != "hybrid"]
        for name in arguments.algorithms.split(","):
            if name == "hybrid":
                raise CommError("--algorithms hybrid is one of the others at each size: verify those by their names")
            if name not in known:
                raise CommError(f"--algorithms: {name!r} is unknown; choose of {', '.join(known)}, or all")
    return Plan(
        counts=counts,
        algorithms=arguments.algorithms,
        precisions=_parse_precisions(arguments.precisions),
        pieces=_parse_pieces(arguments.pieces),
        repetitions=arguments.repetitions,
        reduce_dtype=arguments.reduce_dtype,
        seed=arguments.seed,
        output=arguments.output,
    )


def _parse_precisions(text: str) -> tuple[Precision, ...] | None:
    if text == "all":
        return None
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in PRECISIONS:
            raise CommError(f"--precisions: {name!r} is unknown; choose of {', '.join(PRECISIONS)}, or all")
    return tuple(PRECISIONS[name] for name in names)


def _parse_pieces(text: str) -> tuple[int, ...]:
    words = tuple(dict.fromkeys(text.split(",")))
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise CommError(f"--pieces {text!r} are no numbers of pieces; give such as 1 or 1,3")
    return tuple(dict.fromkeys(map(int, words)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch comm verify",
        usage="bigbatch comm verify [OPTION ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Compare the sums that this cluster makes, element by element, with exact ones. Runs as one rank of a job.

Every rank draws numbers of either sign from 2**-31 to 1, by a seed, its rank and the element: so any rank
knows those of the others. Each algorithm sums them, whole and cut into pieces as fusion plans cut gradients:
- as fp32, over wires of bf16 and fp16, and as the whole numbers of run.reproducible (grid);
- several times: do the same numbers have the same sum each time?
- on every rank: do all hold the same bits?
- beside each other: which algorithms and cuts give the same bits?
Floating-point sums depend on their order, so algorithms may differ, within a bound that grows with the number of
ranks; a sum that does not repeat itself, or that ranks hold differently, is a fault: it is named, by
algorithm, size, rank and element, and the command ends with 1.""",
        epilog="example: bigbatch launch mpirun --ranks 4 -- comm verify --max-bytes 1M --output verify.jsonl",
    )
    add = parser.add_argument
    add("--min-bytes", default="4K", help="smallest tensor, in fp32; K, M and G are powers of 1024 (%(default)s)")
    add("--max-bytes", default="16M", help="largest tensor (default: %(default)s)")
    add("--factor", type=whole, default=64, help="from one size to the next (default: %(default)s)")
    add("--algorithms", default="all", help="such as ring,native (default: %(default)s that run here)")
    add("--precisions", default="all", help=f"of {','.join(PRECISIONS)} (default: %(default)s that can be summed here)")
    add("--pieces", default="1,3", help="numbers of pieces to cut a tensor into (default: %(default)s)")
    add("--repetitions", type=whole, default=5, help="of each sum (default: %(default)s)")
    add("--seed", type=whole, default=0, help="draws other numbers (default: %(default)s)")
    add_connection_options(parser)
    add("--output", type=as_path, metavar="FILE.jsonl", help="a line of conditions, a line per row, and the verdict")
    return parser
