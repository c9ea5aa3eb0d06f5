"""`bigbatch config list`: the experiments that come with bigbatch."""

import argparse
import re
from collections.abc import Sequence
from itertools import takewhile

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
        print_line(f"{name:32} {_first_sentence(find_config(name).read_text())}")
    return 0


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment with which a config begins."""
    comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
    words = " ".join(line.removeprefix("#").strip() for line in comment)
    return re.split(r"(?<! al)\.(?: |$)", words)[0]
