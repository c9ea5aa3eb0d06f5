"""`bigbatch comm`: measure the network of this job's ranks, and tune for it.

It stands here because tuning needs a model's backward pass, and comm knows no trainer.
"""

from collections.abc import Sequence

from bigbatch.trainer.subcommand import run_subcommand

COMMANDS = {
    "bench": ("bigbatch.comm.command", "time the all-reduce by size, all algorithms side by side"),
    "tune": ("bigbatch.trainer.tune_comm", "choose algorithm by size and fusion plan for this cluster and a model"),
}


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `bigbatch comm`; its exit code."""
    return run_subcommand(
        "bigbatch comm",
        COMMANDS,
        argv,
        description="Measure the network between the ranks of a job.",
        epilog="example: bigbatch launch mpirun --ranks 4 -- comm bench --max-bytes 16M",
    )
