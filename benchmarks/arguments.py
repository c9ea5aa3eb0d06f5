"""Shared parts of the benchmarks' command lines."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from bigbatch.errors import UserError


def at_least(least: int) -> Callable[[str], int]:
    """Make a type for argparse: whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least {least}")
        return int(text)

    return parse


def require_at_least_one(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """End the process with a message on the first of these options that is below 1."""
    for name in names:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give at least 1")


def run(main: Callable[[], None]) -> None:
    """End the process with one line for a user's error."""
    try:
        main()
    except UserError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
