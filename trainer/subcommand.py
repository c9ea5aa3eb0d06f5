"""Commands in groups: `bigbatch GROUP COMMAND`. Imports nothing heavy before it knows what to do."""

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module


def run_subcommand(
    prog: str, commands: Mapping[str, tuple[str, str]], argv: Sequence[str], *, description: str, epilog: str
) -> int:
    """Run the command that argv begins with; its exit code. commands: name -> its module, with a main, and a help."""
    what = "; ".join(f"{name}: {text}" for name, (_, text) in commands.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} {{{','.join(commands)}}} [OPTION ...]",
        description=f"{description} {what}",
        epilog=epilog,
    )
    parser.add_argument("command", choices=tuple(commands), help=what)
    command = parser.parse_args(argv[:1]).command
    return int(import_module(commands[command][0]).main(argv[1:]))
