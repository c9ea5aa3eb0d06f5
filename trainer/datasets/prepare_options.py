"""`bigbatch data prepare`: official archives into the folders that a run reads."""

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from bigbatch.errors import DataError, print_line
from bigbatch.paths import as_path
from bigbatch.trainer.config.fields import MEGAPIXELS
from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.datasets.processes import MAX_WORKERS
from bigbatch.words import whole

if TYPE_CHECKING:
    from bigbatch.trainer.datasets.prepare import DataSet

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

IMAGENETTE_SIZES = ("full", "320px", "160px")


@dataclass(frozen=True)
class _Help:
    summary: str
    details: str
    options: str
    """Options of the example; archives that it names are not downloaded."""


_CIFAR = "Writes lossless PNG files, named by their positions in the original order.\nDownloads the archive (170 MB)."
_DATA_SETS = {
    "imagenet": _Help(
        "ImageNet 2012: 1,000 classes, 1,281,167 + 50,000 images",
        "image-net.org provides the archives after registration (155 GB); put all three into one folder:\n"
        "  ILSVRC2012_img_train.tar       training images, an archive per class\n"
        "  ILSVRC2012_img_val.tar         validation images\n"
        "  ILSVRC2012_devkit_t12.tar.gz   development kit: the classes of the validation images (read by SciPy)\n"
        "They are read in place, without temporary copies; ROOT needs as much room again.",
        "--archives downloads --check-md5",
    ),
    "cifar10": _Help("CIFAR-10: 10 classes, 50,000 + 10,000 images of 32x32", _CIFAR, ""),
    "cifar100": _Help("CIFAR-100: 100 classes, 50,000 + 10,000 images of 32x32", _CIFAR, ""),
    "imagenette": _Help(
        "Imagenette 2: ten easy classes of ImageNet, 9,469 + 3,925 images",
        "Downloads fastai's archive: imagenette2.tgz (1.6 GB), imagenette2-320.tgz (340 MB) or\n"
        "imagenette2-160.tgz (99 MB).",
        "--size 160px",
    ),
    "imagenet-v2": _Help(
        "ImageNet-V2, matched frequency: 10,000 new validation images for ImageNet's classes",
        "Writes ROOT/val from imagenetv2-matched-frequency.tar.gz (1.3 GB), which is at\n"
        "https://huggingface.co/datasets/vaishaal/ImageNetV2. Its folders 0 to 999 are positions in the sorted list\n"
        "of ImageNet's classes, which are read from a prepared ImageNet.",
        "--archives downloads --classes-from data/imagenet",
    ),
}


def two_names(text: str) -> tuple[str, str]:
    """Parse the value of --columns. Raises: ArgumentTypeError."""
    first, comma, second = text.partition(",")
    if not comma or "," in second:
        raise argparse.ArgumentTypeError(f"{text!r} is not possible: give two names, such as image,label")
    return first, second


def add_max_megapixels(parser: argparse.ArgumentParser, *, effect: str = "a larger one is bad and not decoded") -> None:
    """Add the option to a command that reads images before there is an experiment; its value is a number."""
    parser.add_argument(
        "--max-megapixels",
        type=_megapixels,
        default=DataConfig.max_megapixels,
        metavar="N",
        help=f"most million pixels of an image; {effect}. A run has data.max_megapixels (default: %(default)s)",
    )


def _megapixels(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not MEGAPIXELS.holds(number):
        raise argparse.ArgumentTypeError(f"{text} is not possible; give a number {MEGAPIXELS.legal}")
    return number


def add_prepare(commands: "Subparsers") -> None:
    """Add `prepare` with a subcommand for each data set."""
    prepare = commands.add_parser(
        "prepare",
        help="turn the official archives of a data set into folders of images",
        description="Write ROOT/train/<class>/<image> and ROOT/val/<class>/<image>\nfrom a data set's official "
        "archives. The same command continues an interrupted run.",
        epilog="`bigbatch data prepare DATASET --help` has an example for each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data_sets = prepare.add_subparsers(required=True, metavar="DATASET")
    for name, texts in _DATA_SETS.items():
        required = "--archives" in texts.options
        needs = " --archives FOLDER" * required + " --classes-from ROOT_OF_IMAGENET" * (name == "imagenet-v2")
        parser = data_sets.add_parser(
            name,
            usage=f"bigbatch data prepare {name} ROOT{needs} [OPTION ...]",
            help=texts.summary,
            description=texts.details,
            epilog=f"example:\n  bigbatch data prepare {name} data/{name} {texts.options}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("root", type=as_path, metavar="ROOT", help=f"folder to write, such as data/{name}")
        parser.add_argument("--threads", type=whole, default=8, help="files written at once (default: %(default)s)")
        where = "folder of the archives" + ("" if required else "; nothing is downloaded")
        parser.add_argument("--archives", type=as_path, required=required, metavar="FOLDER", help=where)
        if name == "imagenet-v2":
            names = "prepared ImageNet, for its class names; the archive only has class numbers"
            parser.add_argument("--classes-from", type=as_path, required=True, metavar="ROOT_OF_IMAGENET", help=names)
        else:
            parser.add_argument("--check-md5", action="store_true", help="compare the archives with their MD5 sums")
        add_max_megapixels(parser, effect="an archive with a file that takes more memory than such an image is refused")
        if name == "imagenette":
            sides = "shorter side of the images (default: %(default)s, as in ImageNet)"
            parser.add_argument("--size", choices=IMAGENETTE_SIZES, default="full", help=sides)
        parser.set_defaults(run=partial(_run, name), parser=parser)
    _add_tables(data_sets)


def _add_tables(data_sets: "Subparsers") -> None:
    tables = data_sets.add_parser(
        "huggingface",
        help="an image data set of Hugging Face's on disk, in Arrow or Parquet files",
        description="Write ROOT/train/<class>/<image> and ROOT/val/<class>/<image>, or ROOT/<class>/<image> without a "
        "validation split, from what `datasets` saved or from Parquet files. Nothing is downloaded.",
        epilog="example: bigbatch data prepare huggingface data/pets --archives downloads/pets",
    )
    tables.add_argument("root", type=as_path, metavar="ROOT", help="folder to write, which must not exist")
    tables.add_argument("--archives", type=as_path, required=True, metavar="FOLDER", help="folder of the files")
    names = "names of the columns of image and label (default: those that the files state)"
    tables.add_argument("--columns", type=two_names, metavar="COLUMN,COLUMN", help=names)
    tables.add_argument("--leave-out", action="store_true", help="leave out rows without an image or its label")
    tables.set_defaults(run=_run_tables)


def _run_tables(arguments: argparse.Namespace) -> int:
    from bigbatch.trainer.datasets.check_report import finding_lines
    from bigbatch.trainer.datasets.show_progress import show_progress
    from bigbatch.trainer.datasets.tables import find_tables, unpack_tables

    folder, root = arguments.archives, arguments.root
    if (tables := find_tables(folder)) is None:
        raise DataError(f"{folder}: holds no *.parquet, and no data set that `datasets` saved; name its folder")
    with show_progress(f"writing {root}", unit="bytes") as on_progress:
        findings = unpack_tables(
            folder, tables, root, columns=arguments.columns, on_progress=on_progress, leave_out=arguments.leave_out
        )
    findings = [finding for finding in findings if finding.cases]
    for line in (*finding_lines(findings, num_shown=3), f"{root}: written; next: bigbatch init {root}"):
        print_line(line)
    return int(any(finding.is_problem for finding in findings))


def _run(name: str, arguments: argparse.Namespace) -> int:
    from bigbatch.trainer.datasets.prepare import prepare
    from bigbatch.trainer.datasets.show_progress import show_each

    if not 1 <= arguments.threads <= MAX_WORKERS:
        arguments.parser.error(f"argument --threads: {arguments.threads} is not possible; give 1 to {MAX_WORKERS}")
    start = time.monotonic()
    data_set = replace(_find(name, arguments), max_pixels=round(1e6 * arguments.max_megapixels))
    with show_each() as on_progress:
        written = prepare(
            arguments.root,
            data_set,
            archives=arguments.archives,
            with_md5=getattr(arguments, "check_md5", False),
            num_threads=arguments.threads,
            on_progress=on_progress,
        )
    counts = " and ".join(f"{number:,} in {split}" for split, number in data_set.num_images.items())
    how = f"written in {time.monotonic() - start:.1f} s ({', '.join(written)})" if written else "complete already"
    print_line(f"{arguments.root}: {data_set.num_classes:,} classes, images: {counts}; {how}")
    if "train" not in data_set.num_images:
        print_line(f"evaluation reads the class names from {arguments.root}/train: link ImageNet's there")
    print_line(f"in the config: data.root: {arguments.root}, data.num_classes: {data_set.num_classes}")
    return 0


def _find(name: str, arguments: argparse.Namespace) -> "DataSet":
    from bigbatch.trainer.datasets import prepare as known

    if name == "imagenet-v2":
        wnids = known.read_wnids(arguments.classes_from, num_classes=known.IMAGENET_V2.num_classes)
        return replace(known.IMAGENET_V2, read=partial(known.read_imagenet_v2, wnids))
    if name == "imagenette":
        return known.IMAGENETTE[arguments.size]
    return known.IMAGENET if name == "imagenet" else known.CIFAR[int(name.removeprefix("cifar"))]
