"""`bigbatch data prepare`: official archives into the folders that a run reads."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bigbatch.errors import print_line
from bigbatch.paths import as_path

if TYPE_CHECKING:
    from bigbatch.trainer.datasets.class_folders import DataSet
    from bigbatch.trainer.datasets.show_progress import Report

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

Prepare = Callable[[argparse.Namespace, "Report"], "tuple[DataSet, list[str]]"]
"""What a data set's subcommand does: the data set, and the splits that were not there yet."""

IMAGENETTE_SIZES = ("full", "320px", "160px")
_LAYOUT = "ROOT/train/<class>/<picture> and ROOT/val/<class>/<picture>"
_RESUMES = "An interrupted run is gone on with: give the same command again."


def add_prepare(commands: "Subparsers") -> None:
    """Add `prepare` with a subcommand for each data set."""
    prepare = commands.add_parser(
        "prepare",
        help="turn the official archives of a data set into folders of pictures",
        description=f"Write {_LAYOUT}\nfrom a data set's official archives. {_RESUMES}",
        epilog="`bigbatch data prepare DATASET --help` has an example for each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data_sets = prepare.add_subparsers(required=True, metavar="DATASET")
    _add_imagenet(data_sets)
    for number in (10, 100):
        _add_cifar(data_sets, number)
    _add_imagenette(data_sets)
    _add_imagenet_v2(data_sets)


def _add_imagenet(data_sets: "Subparsers") -> None:
    parser = _add_data_set(
        data_sets,
        "imagenet",
        prepare=_imagenet,
        help="ImageNet 2012: 1,000 classes, 1,281,167 + 50,000 pictures",
        description="The archives are handed out by image-net.org after registration (155 GB); put all three into one "
        "folder:\n"
        "  ILSVRC2012_img_train.tar       training pictures, an archive per class\n"
        "  ILSVRC2012_img_val.tar         validation pictures\n"
        "  ILSVRC2012_devkit_t12.tar.gz   development kit: the classes of the validation pictures\n"
        "They are read in place, without temporary copies; ROOT needs as much room again.",
        example="bigbatch data prepare imagenet data/imagenet --archives downloads --check-md5",
    )
    parser.add_argument(
        "--archives", type=as_path, required=True, metavar="FOLDER", help="where the three archives lie"
    )
    _add_check_md5(parser)


def _add_cifar(data_sets: "Subparsers", number: int) -> None:
    parser = _add_data_set(
        data_sets,
        f"cifar{number}",
        prepare=partial(_cifar, number),
        help=f"CIFAR-{number}: {number} classes, 50,000 + 10,000 pictures of 32x32",
        description=f"Writes lossless PNG files; the file name is the picture's position in the original order.\n"
        f"Downloads cifar-{number}-python.tar.gz (170 MB) into ROOT/archives; --archives names a folder that has it.",
        example=f"bigbatch data prepare cifar{number} data/cifar{number}",
    )
    _add_optional_archives(parser)


def _add_imagenette(data_sets: "Subparsers") -> None:
    parser = _add_data_set(
        data_sets,
        "imagenette",
        prepare=_imagenette,
        help="Imagenette 2: ten easy classes of ImageNet, 9,469 + 3,925 pictures",
        description="Downloads fastai's archive into ROOT/archives; --archives names a folder that has it:\n"
        "imagenette2.tgz (1.6 GB), imagenette2-320.tgz (340 MB) or imagenette2-160.tgz (99 MB).",
        example="bigbatch data prepare imagenette data/imagenette --size 160px",
    )
    parser.add_argument(
        "--size",
        choices=IMAGENETTE_SIZES,
        default="full",
        help="shorter side of the pictures (default: %(default)s, as in ImageNet)",
    )
    _add_optional_archives(parser)


def _add_imagenet_v2(data_sets: "Subparsers") -> None:
    parser = _add_data_set(
        data_sets,
        "imagenet-v2",
        prepare=_imagenet_v2,
        help="ImageNet-V2, matched frequency: 10,000 new validation pictures for ImageNet's classes",
        description="Writes ROOT/val from imagenetv2-matched-frequency.tar.gz (1.3 GB), which lies at\n"
        "https://huggingface.co/datasets/vaishaal/ImageNetV2. Its folders 0 to 999 are positions in the sorted list\n"
        "of ImageNet's classes, which are read from a prepared ImageNet.",
        example="bigbatch data prepare imagenet-v2 data/imagenet-v2 --archives downloads --classes-from data/imagenet",
    )
    parser.add_argument("--archives", type=as_path, required=True, metavar="FOLDER", help="where the archive lies")
    parser.add_argument(
        "--classes-from",
        type=as_path,
        required=True,
        metavar="ROOT_OF_IMAGENET",
        help="prepared ImageNet, for the names of its classes; the archive only has their numbers",
    )


def _add_data_set(
    data_sets: "Subparsers", name: str, *, prepare: Prepare, help: str, description: str, example: str
) -> argparse.ArgumentParser:
    parser = data_sets.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", type=as_path, metavar="ROOT", help=f"folder to write, such as data/{name}")
    parser.add_argument("--threads", type=_at_least_one, default=8, help="files written at once (default: %(default)s)")
    parser.set_defaults(run=partial(_run, prepare), check_md5=False)
    return parser


def _add_optional_archives(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--archives", type=as_path, metavar="FOLDER", help="where the archive lies; nothing is downloaded"
    )
    _add_check_md5(parser)


def _add_check_md5(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check-md5", action="store_true", help="compare the archives with their published MD5 sums")


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not possible; give 1 or more")
    return int(text)


def _run(prepare: Prepare, arguments: argparse.Namespace) -> int:
    from bigbatch.trainer.datasets.show_progress import show_each

    start = time.monotonic()
    with show_each() as on_progress:
        data_set, written = prepare(arguments, on_progress)
    for line in summary(data_set, arguments.root, written=written, seconds=time.monotonic() - start):
        print_line(line)
    return 0


def summary(data_set: "DataSet", root: Path, *, written: list[str], seconds: float) -> list[str]:
    """Say what there is now, and how to train on it."""
    counts = " and ".join(f"{number:,} in {split}" for split, number in data_set.num_images.items())
    how = f"written in {seconds:.1f} s ({', '.join(written)})" if written else "complete already"
    lines = [f"{root}: {data_set.num_classes:,} classes, pictures: {counts}; {how}"]
    if "train" not in data_set.num_images:
        lines.append(f"evaluation reads the class names from {root}/train: link ImageNet's there")
    lines.append(f"in the config: data.root: {root}, data.num_classes: {data_set.num_classes}")
    return lines


def _imagenet(arguments: argparse.Namespace, on_progress: "Report") -> "tuple[DataSet, list[str]]":
    from bigbatch.trainer.datasets.prepare import IMAGENET, prepare_imagenet

    written = prepare_imagenet(
        arguments.root,
        archives=arguments.archives,
        data_set=IMAGENET,
        with_md5=arguments.check_md5,
        num_threads=arguments.threads,
        on_progress=on_progress,
    )
    return IMAGENET, written


def _cifar(number: int, arguments: argparse.Namespace, on_progress: "Report") -> "tuple[DataSet, list[str]]":
    from bigbatch.trainer.datasets import cifar

    data_set = {10: cifar.CIFAR10, 100: cifar.CIFAR100}[number]
    return data_set, _from_one(arguments, data_set=data_set, read=cifar.read_cifar, on_progress=on_progress)


def _imagenette(arguments: argparse.Namespace, on_progress: "Report") -> "tuple[DataSet, list[str]]":
    from bigbatch.trainer.datasets.prepare import IMAGENETTE, read_imagenette

    data_set = IMAGENETTE[arguments.size]
    return data_set, _from_one(arguments, data_set=data_set, read=read_imagenette, on_progress=on_progress)


def _imagenet_v2(arguments: argparse.Namespace, on_progress: "Report") -> "tuple[DataSet, list[str]]":
    from bigbatch.trainer.datasets.prepare import IMAGENET_V2, read_imagenet_v2, read_wnids

    wnids = read_wnids(arguments.classes_from, num_classes=IMAGENET_V2.num_classes)
    read = partial(read_imagenet_v2, wnids=wnids)
    return IMAGENET_V2, _from_one(arguments, data_set=IMAGENET_V2, read=read, on_progress=on_progress)


def _from_one(
    arguments: argparse.Namespace, *, data_set: "DataSet", read: "Callable", on_progress: "Report"
) -> list[str]:
    from bigbatch.trainer.datasets.prepare import prepare_from_one

    return prepare_from_one(
        arguments.root,
        archives=arguments.archives,
        data_set=data_set,
        read=read,
        with_md5=arguments.check_md5,
        num_threads=arguments.threads,
        on_progress=on_progress,
    )
