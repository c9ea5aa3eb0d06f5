"""`bigbatch config diff`: the keys in which two experiments differ."""

import argparse
from collections.abc import Sequence

from bigbatch.errors import print_line
from bigbatch.paths import expand_path
from bigbatch.trainer.config.file import Resolved, resolve
from bigbatch.trainer.config.schema import KEYS, lookup
from bigbatch.trainer.config.strict_yaml import as_yaml


def main(argv: Sequence[str]) -> int:
    """Print the keys that differ. Raises: ConfigError."""
    arguments = _make_parser().parse_args(argv)
    names = (arguments.a, arguments.b)
    a, b = (resolve([f"--config={name}"], prog="bigbatch config diff") for name in names)
    differing = rows(a, b)
    if not differing:
        print_line(f"{names[0]} and {names[1]} are equal")
        return 0
    table = [("key", *names), *differing]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print_line("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def rows(a: Resolved, b: Resolved) -> list[tuple[str, str, str]]:
    """Return key, value and origin in a, value and origin in b, of each key with two values."""
    return [
        (key, _described(key, a), _described(key, b)) for key in KEYS if lookup(a.config, key) != lookup(b.config, key)
    ]


def _described(key: str, resolved: Resolved) -> str:
    return f"{as_yaml(lookup(resolved.config, key))} ({resolved.origins[key]})"


def _make_parser() -> argparse.ArgumentParser:
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
    return parser
