"""`bigbatch comm`: measure the network of this job's ranks, and tune for it.

It stands here because tuning needs a model's backward pass, and comm knows no trainer.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "bench": ("bigbatch.comm.command", "time the all-reduce by size, all algorithms side by side"),
    "tune": ("bigbatch.trainer.tune_comm", "choose algorithm by size and fusion plan for this cluster and a model"),
}


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `bigbatch comm`; its exit code."""
    what = "; ".join(f"{name}: {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="bigbatch comm",
        usage=f"bigbatch comm {{{','.join(COMMANDS)}}} [OPTION ...]",
        description=f"Measure the network between the ranks of a job. {what}",
        epilog="example: bigbatch launch mpirun --ranks 4 -- comm bench --max-bytes 16M",
    )
    parser.add_argument("command", choices=tuple(COMMANDS), help=what)
    command = parser.parse_args(argv[:1]).command
    return int(import_module(COMMANDS[command][0]).main(argv[1:]))
