"""`bigbatch config diff`: the keys in which two experiments differ."""

import argparse
from collections.abc import Sequence

from bigbatch.cells import columns
from bigbatch.errors import print_line
from bigbatch.paths import expand_path
from bigbatch.trainer.config.file import resolve
from bigbatch.trainer.config.schema import KEYS, lookup
from bigbatch.trainer.config.strict_yaml import as_yaml


def main(argv: Sequence[str]) -> int:
    """Print the keys that differ. Raises: ConfigError."""
    parser = argparse.ArgumentParser(
        prog="bigbatch config diff",
        description="Print the keys in which two experiments differ, and where each value comes from. The exit code is "
        "0 even if they differ.",
        epilog="example: bigbatch config diff imagenet/resnet50_8k imagenet/resnet50_64k",
    )
    for name in ("a", "b"):
        parser.add_argument(
            name, type=expand_path, metavar=name.upper(), help="a packaged experiment, a YAML file or a run folder"
        )
    arguments = parser.parse_args(argv)
    names = (arguments.a, arguments.b)
    a, b = (resolve([f"--config={name}"], prog="bigbatch config diff") for name in names)
    differing = [key for key in KEYS if lookup(a.config, key) != lookup(b.config, key)]
    if not differing:
        print_line(f"{names[0]} and {names[1]} are equal")
        return 0
    values = [[f"{as_yaml(lookup(each.config, key))} ({each.origins[key]})" for each in (a, b)] for key in differing]
    for line in columns([("key", *names), *((key, *both) for key, both in zip(differing, values, strict=True))]):
        print_line(line)
    return 0
