"""`bigbatch config list`: the experiments that come with bigbatch."""

import argparse
from collections.abc import Sequence

from bigbatch.errors import print_line
from bigbatch.trainer.config.file import find_config, packaged_configs


def main(argv: Sequence[str]) -> int:
    """Print a line for each packaged experiment."""
    argparse.ArgumentParser(
        prog="bigbatch config list",
        description="Print the names of the packaged experiments, and what each is.",
        epilog="example: bigbatch config list",
    ).parse_args(argv)
    for name in packaged_configs():
        first = find_config(name).read_text().partition("\n")[0]
        print_line(f"{name:32} {first.removeprefix('# ')}")
    return 0
