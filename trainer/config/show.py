"""`bigbatch config show`: print a complete experiment and the origin of each value."""

import argparse
from collections.abc import Sequence

from bigbatch.errors import print_line
from bigbatch.paths import expand_path
from bigbatch.trainer.config.file import Resolved, find_config, resolve
from bigbatch.trainer.config.options import parse_beside_keys
from bigbatch.trainer.config.schema import KEYS, SECTIONS, lookup
from bigbatch.trainer.config.strict_yaml import as_yaml

COLUMN = 50
"""Column at which origins begin, unless a value is longer."""


def main(argv: Sequence[str]) -> int:
    """Print an experiment. Raises: ConfigError."""
    parser = argparse.ArgumentParser(
        prog="bigbatch config show",
        usage="bigbatch config show NAME [--section.key VALUE ...]",
        description="Print the complete experiment as YAML, which --config takes, and where each value comes from: "
        "default, base FILE, recipe FILE or command line.",
        epilog="example: bigbatch config show imagenet/resnet50_8k --run.epochs 100",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", type=expand_path, metavar="NAME", help="a packaged experiment, a YAML file or a run folder"
    )
    # NAME may come as it does to the other commands
    words = [word.removeprefix("--config=") for word in argv if word != "--config"]
    arguments, overrides = parse_beside_keys(parser, words)
    path = find_config(arguments.name, what="NAME")
    for line in lines(resolve([f"--config={path}", *overrides], prog="bigbatch config show")):
        print_line(line)
    return 0


def lines(resolved: Resolved) -> list[str]:
    """Write the experiment as YAML, which load_config takes back, with the origin of each value as a comment."""
    found = []
    for section in SECTIONS:
        found.append(f"{section}:")
        for name, key in KEYS.items():
            if key.section == section:
                stated = f"  {key.name}: {as_yaml(lookup(resolved.config, name))}"
                found.append(f"{stated:{COLUMN}} # {resolved.origins[name]}")
    return found
