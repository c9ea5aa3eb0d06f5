"""`bigbatch data`: prepare and check images before a run."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from bigbatch.cores import usable_cores
from bigbatch.errors import print_line
from bigbatch.files import as_json
from bigbatch.paths import as_path
from bigbatch.trainer.datasets.prepare_options import add_max_megapixels, add_prepare
from bigbatch.words import whole


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `bigbatch data`; return the exit code."""
    arguments = make_parser().parse_args(argv)
    return int(arguments.run(arguments))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="bigbatch data", description="Prepare images for training.")
    commands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    generate = commands.add_parser(
        "generate",
        help="write the embedded data set: 10 classes of generated shapes and textures",
        description="Write JPEG images of 10 classes in ImageNet's folder layout, train/<class>/ and val/<class>/. "
        "The same seed gives the same bytes. A folder that is complete already is left as it is.",
    )
    generate.add_argument("root", type=as_path, help="folder to write, such as data/shapes")
    generate.add_argument("--seed", type=whole, default=0, help="seed of the images (default: %(default)s)")
    generate.add_argument("--workers", type=whole, default=len(usable_cores()), help="processes (default: %(default)s)")
    generate.set_defaults(run=_generate)
    add_prepare(commands)
    _add_check(commands)
    _add_pack(commands)
    _add_stage(commands)
    return parser


def _generate(arguments: argparse.Namespace) -> int:
    from bigbatch.trainer.datasets.generated import write_dataset
    from bigbatch.trainer.datasets.show_progress import show_progress

    with show_progress(f"writing {arguments.root}") as on_progress:
        is_new = write_dataset(
            arguments.root, seed=arguments.seed, num_workers=arguments.workers, on_progress=on_progress
        )
    print_line(f"{arguments.root}: {'written' if is_new else 'complete already'}")
    return 0


def _add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = commands.add_parser(
        "check",
        help="check every image of a data set",
        description="Decode every image of ROOT/train and ROOT/val and report what they hold: counts, sizes, "
        "formats, bad files, duplicates inside a split and across them. Exit code 0 when fit for training, 1 when "
        "there are problems; remarks do not count.",
    )
    check.add_argument(
        "root", type=as_path, help="folder with train/ and val/, such as data/imagenet, or a list by `bigbatch init`"
    )
    check.add_argument("--no-decode", action="store_true", help="read files and their headers only: much faster")
    check.add_argument("--json", type=as_path, metavar="FILE", help="write all findings with all paths to FILE")
    check.add_argument("--workers", type=whole, default=len(usable_cores()), help="processes (default: %(default)s)")
    add_max_megapixels(check)
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from bigbatch.trainer.datasets.check import check_dataset
    from bigbatch.trainer.datasets.check_report import print_report, write_json
    from bigbatch.trainer.datasets.show_progress import show_progress
    from bigbatch.trainer.input.data_root import url_of

    with show_progress(f"checking {url_of(arguments.root) or arguments.root}") as on_progress:
        report = check_dataset(
            arguments.root,
            decode=not arguments.no_decode,
            num_workers=arguments.workers,
            max_pixels=round(1e6 * arguments.max_megapixels),
            on_progress=on_progress,
        )
    print_report(report, console=Console())
    if arguments.json:
        write_json(report, arguments.json)
    return 1 if report.problems else 0


def _add_pack(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    pack = commands.add_parser(
        "pack",
        usage="bigbatch data pack (SRC DST [OPTION ...] | --verify DST)",
        help="pack class folders into tar shards with an index",
        description="Write DST/<split>/shard-000000.tar ... and an index, from SRC/<split>/<class>/<image>. Any tool "
        "for WebDataset reads the shards; data.root takes DST. The same command resumes an interrupted pack. "
        "Without --short-side the images stay byte for byte what they are.",
    )
    pack.add_argument("source", type=as_path, nargs="?", metavar="SRC", help="folder with train/ and val/, or a list")
    pack.add_argument("target", type=as_path, nargs="?", metavar="DST", help="folder to write, such as data/packed")
    pack.add_argument(
        "--shard-mb",
        type=whole,
        default=512,
        metavar="N",
        help="most megabytes (1e6) of a shard (default: %(default)s)",
    )
    pack.add_argument(
        "--short-side",
        dest="max_side",
        type=whole,
        metavar="N",
        help="shrink images with a shorter side above N pixels to N; of their EXIF data only the orientation stays, "
        "and transparent images are not shrunk",
    )
    pack.add_argument("--quality", type=whole, default=90, help="JPEG quality of shrunk images (default: %(default)s)")
    pack.add_argument("--workers", type=whole, default=len(usable_cores()), help="processes (default: %(default)s)")
    pack.add_argument("--splits", default="train,val", help="folders of SRC to pack (default: %(default)s)")
    pack.add_argument(
        "--verify",
        type=as_path,
        metavar="DST",
        help="pack nothing: read all of DST again and compare it with its index",
    )
    add_max_megapixels(pack)
    pack.set_defaults(run=_pack, parser=pack)


def _pack(arguments: argparse.Namespace) -> int:
    if arguments.verify and not arguments.source:
        return _verify(arguments)
    if arguments.verify or not arguments.target:
        arguments.parser.error("give SRC and DST, or --verify DST alone")
    from bigbatch.trainer.datasets.pack import PackRecipe, pack
    from bigbatch.trainer.datasets.show_progress import show_progress

    with show_progress(f"packing {arguments.target}") as on_progress:
        summary = pack(
            arguments.source,
            arguments.target,
            recipe=PackRecipe(
                arguments.shard_mb * 10**6, arguments.max_side, arguments.quality, round(1e6 * arguments.max_megapixels)
            ),
            splits=arguments.splits.split(","),
            num_workers=arguments.workers,
            on_progress=on_progress,
            on_left_out=print_line,
        )
    print_line(f"{arguments.target}: {summary}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from bigbatch.trainer.datasets.show_progress import show_progress
    from bigbatch.trainer.datasets.verify_shards import verify

    with show_progress(f"verifying {arguments.verify}", unit="shards") as on_progress:
        num_images = verify(arguments.verify, num_workers=arguments.workers, on_progress=on_progress)
    print_line(f"{arguments.verify}: all {num_images} images are as they were packed")
    return 0


def _add_stage(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    stage = commands.add_parser(
        "stage",
        help="copy packed shards to a disk or the memory of this node",
        description="Copy the packed data set SRC to the folder DST near the GPUs, and compare every byte with its "
        "SHA-256; data.root then takes DST. The same command resumes an interrupted copy. Every process of a node "
        "may call it: one copies, the others wait for its end.",
        epilog="examples:\n"
        "  bigbatch data stage data/imagenet-packed /scratch/imagenet     a disk of the node\n"
        "  bigbatch data stage data/imagenet-500 /dev/shm/imagenet        its memory, which its ranks then share\n"
        "  srun --ntasks-per-node=1 bigbatch data stage SRC DST           on every node of a job, before the training\n"
        "  bigbatch data stage --shared SRC /local/imagenet               by root: one copy for all users of the node",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stage.add_argument("source", type=as_path, metavar="SRC", help="DST of `bigbatch data pack`")
    stage.add_argument("target", type=as_path, metavar="DST", help="folder to write, such as /scratch/imagenet")
    stage.add_argument("--shared", action="store_true", help="let all users of the node read the copy, or use root's")
    stage.add_argument(
        "--owner",
        action="append",
        default=[],
        metavar="USER",
        help="with --shared: trust this user, too, and use its copy; can be repeated",
    )
    threads = min(16, len(usable_cores()))  # each hashes; a server is not faster with more streams than that
    stage.add_argument("--workers", type=whole, default=threads, help="threads that copy (default: %(default)s)")
    stage.add_argument("--json", action="store_true", help="print what was done as one line of JSON")
    stage.set_defaults(run=_stage, parser=stage)


def _stage(arguments: argparse.Namespace) -> int:
    from bigbatch.trainer.datasets.show_progress import show_progress
    from bigbatch.trainer.datasets.stage import stage
    from bigbatch.trainer.input.base import written_keys

    target = arguments.target
    if arguments.owner and not arguments.shared:
        arguments.parser.error("--owner needs --shared: only a shared copy may be another user's")
    with show_progress(f"staging {target}", unit="MB") as on_progress:
        summary = stage(
            arguments.source,
            target,
            shared_by=["root", *arguments.owner] if arguments.shared else None,
            num_workers=arguments.workers,
            # rounded up, so that a small data set has some, too
            on_progress=lambda done, total: on_progress(-(-done // 10**6), -(-total // 10**6)),
            on_wait=lambda: print_line(f"waiting for another process, which stages into {target}", file=sys.stderr),
        )
    if arguments.json:
        facts = asdict(summary, dict_factory=written_keys)
        print(as_json({"root": str(target), **facts, "gb_per_s": summary.gb_per_s}))
    else:
        print_line(f"{target}: {summary}")
        print_line(f"in the config: data.root: {target}")
    return 0
