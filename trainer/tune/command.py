"""`bigbatch tune`: find the learning rate's range, then the best values of any keys."""

from collections.abc import Sequence

from bigbatch.trainer.subcommand import run_subcommand

COMMANDS = {
    "range": ("bigbatch.trainer.tune.range_test", "raise the learning rate step by step until the loss explodes"),
    "search": ("bigbatch.trainer.tune.search_command", "search config values on short runs, from coarse to fine"),
}


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `bigbatch tune`; its exit code."""
    return run_subcommand(
        "bigbatch tune",
        COMMANDS,
        argv,
        description="Find good values for a config.",
        epilog="example: bigbatch tune range --config quickstart --from 0.1 --to 100 --steps 60 --out runs/range",
    )
