"""`bigbatch config list`: the experiments that come with bigbatch."""

import argparse
import re
from collections.abc import Sequence
from itertools import takewhile

from bigbatch.errors import print_line
from bigbatch.trainer.config.file import find_config, packaged_configs


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(
        prog="bigbatch config list",
        description="Print the names of the packaged experiments, and what each is.",
        epilog="example: bigbatch config list",
    ).parse_args(argv)
    for name in packaged_configs():
        lines = find_config(name).read_text(encoding="utf-8").splitlines()
        comment = takewhile(lambda line: line.startswith("#"), lines)
        words = " ".join(line.removeprefix("#").strip() for line in comment)
        first_sentence = re.split(r"(?<! al)\.(?: |$)", words)[0]
        print_line(f"{name:32} {first_sentence}")
    return 0
