"""`bigbatch data`: the pictures, before a run."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `bigbatch data`; the exit code."""
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bigbatch data", description="Prepare pictures for training.")
    commands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    generate = commands.add_parser(
        "generate",
        help="write the embedded data set: 10 classes of generated shapes and textures",
        description="Write JPEG pictures of 10 classes in ImageNet's folder layout, train/<class>/ and val/<class>/. "
        "The same seed gives the same bytes. A folder that is complete already is left as it is.",
    )
    generate.add_argument("root", type=Path, help="folder to write, such as data/shapes")
    generate.add_argument("--seed", type=int, default=0, help="which pictures (default: %(default)s)")
    generate.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    generate.set_defaults(run=_generate)
    return parser


def _generate(arguments: argparse.Namespace) -> int:
    from rich.progress import Progress

    from bigbatch.trainer.data.generated import write_dataset

    with Progress() as progress:
        task = progress.add_task(f"writing {arguments.root}", total=None)
        is_new = write_dataset(
            arguments.root,
            seed=arguments.seed,
            num_workers=arguments.workers,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    print(f"{arguments.root}: {'written' if is_new else 'complete already'}")
    return 0
