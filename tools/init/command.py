"""`bigbatch init`: examine a folder of images, write a recipe for them, and print the next command."""

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bigbatch.cores import usable_cores
from bigbatch.errors import FAILED, DataError, print_line, printable
from bigbatch.files import write_whole
from bigbatch.paths import as_path
from bigbatch.tools.init.layout import find_layout, split_classes
from bigbatch.tools.init.measure import SampleStatistics, measure
from bigbatch.tools.init.recipe import recipe_text
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets.check import ImageFinding, spelling_finding, unprintable_finding
from bigbatch.trainer.datasets.check_report import finding_lines
from bigbatch.trainer.datasets.prepare_options import add_max_megapixels, two_names
from bigbatch.trainer.datasets.show_progress import show_progress
from bigbatch.trainer.input.base import SPLITS, ImageSource
from bigbatch.trainer.input.image_files import class_key
from bigbatch.trainer.input.listed import index_of, write_list
from bigbatch.trainer.input.order import ImageIndex
from bigbatch.words import decimal, whole

NUM_SHOWN = 3
"""Most cases of a finding to list."""

Splits = Mapping[str, ImageSource]
Listed = dict[str, dict[str, list[str]]] | None
"""Split -> class -> images: the list to write if the folder does not separate the splits; else None."""


def main(argv: Sequence[str]) -> int:
    """Write a recipe, or nothing if there are problems; return the exit code. Raises: DataError; ConfigError."""
    arguments = _options(argv)
    folder: Path = arguments.folder
    recipe: Path = arguments.out
    found = find_layout(folder, labels=arguments.labels, columns=arguments.columns, leave_out=arguments.leave_out)
    splits, listed, made = found.splits, None, {}
    if splits is None:
        listed = {split: {name: [*paths] for name, paths in found.by_split[split].items()} for split in found.by_split}
        if "val" not in listed:
            made = {"val_share": arguments.val_share, "seed": arguments.seed}
            listed = split_classes(listed["train"], **made)
        splits = {split: index_of(str(folder), listed, split) for split in SPLITS}
    findings = [*found.findings, *_class_findings(splits["train"].classes, listed, folder, is_divided=not made)]
    measured = None
    if sum(map(len, splits.values())):
        with show_progress(f"looking at {folder}") as on_progress:
            measured = measure(
                splits,
                max_images=arguments.samples,
                seed=arguments.seed,
                num_workers=arguments.workers,
                max_pixels=round(1e6 * arguments.max_megapixels),
                on_progress=on_progress,
            )
        findings += _unusable(splits, listed, measured, leave_out=arguments.leave_out)
    outputs = [recipe, *([recipe.with_suffix(".json")] if listed else [])]
    existing = tuple(str(path) for path in outputs if os.path.lexists(path) and not arguments.force)
    findings.append(ImageFinding("file that exists", "output", existing, meaning="name another --out, or give --force"))
    findings = sorted((each for each in findings if each.cases), key=lambda finding: not finding.is_problem)
    for line in (*_summary(folder, found.what, splits, measured), *finding_lines(findings, num_shown=NUM_SHOWN)):
        print_line(line)
    num_problems = sum(len(finding.cases) for finding in findings if finding.is_problem)
    if num_problems or measured is None:
        print_line(f"nothing written: {num_problems:,} problem(s)")
        return FAILED
    _write(recipe, splits, listed, measured, arguments=arguments, made=made)
    for line in _next_commands(recipe, splits, is_listed=listed is not None):
        print_line(line)
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, with the recipe's file as out. Raises: SystemExit."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not 0 < arguments.val_share < 1:
        parser.error(f"--val-share {arguments.val_share} is not possible: give a share between 0 and 1")
    if arguments.samples < 1 or arguments.seed < 0:
        parser.error("--samples takes 1 or more, --seed 0 or more")
    # the folder's name in characters that need no quotes in a shell
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", arguments.folder.resolve().name).strip("-.")
    recipe = arguments.out = arguments.out or Path(f"{name or 'mine'}.yaml")
    if recipe.suffix not in (".yaml", ".yml"):  # a list lies beside it, as .json
        parser.error(f"--out {recipe} is not possible: give a file that ends in .yaml or .yml")
    if not os.access(recipe.parent, os.W_OK | os.X_OK):
        reason = "you may not write there" if recipe.parent.is_dir() else "there is no such folder"
        parser.error(f"--out {recipe} is not possible: {recipe.parent}: {reason}")
    return arguments


def _class_findings(
    classes: Sequence[str], listed: Listed, folder: Path, *, is_divided: bool
) -> Iterator[ImageFinding]:
    where = str(folder)
    if len(classes) == 1:
        cases = (f"{folder}: {classes[0]} is the only one",)
        yield ImageFinding("fewer than two classes", where, cases, meaning="a classifier needs two or more")
    if listed:
        yield unprintable_finding(where, classes)
        yield spelling_finding(where, classes)
        val, train = listed["val"], listed["train"]
        trained = {class_key(name) for name in classes if train.get(name)}  # another spelling is a finding of its own
        lacking = tuple(name for name in classes if val.get(name) and class_key(name) not in trained)
        meaning = "add images of it to train, or remove it"
        yield ImageFinding("class that train lacks", where, lacking, meaning=meaning)
        single = tuple(name for name in classes if not val.get(name) and train.get(name))
        kind = "class that val lacks" if is_divided else "class with one image"
        meaning = "used for training only: the accuracy of this class is not measured"
        yield ImageFinding(kind, where, single, is_problem=False, meaning=meaning)
        if single and not any(val.values()):
            yield _nothing_to_validate(where)


def _unusable(splits: Splits, listed: Listed, measured: SampleStatistics, *, leave_out: bool) -> Iterator[ImageFinding]:
    """Report unusable images; with leave_out remove them from the list."""
    advice = "replace or remove it" + (", or give --leave-out" if listed and not leave_out else "")
    listed = listed if leave_out else None
    for split, found in measured.faults.items():
        meaning = advice if listed is None else "left out"
        yield ImageFinding("unusable image", split, tuple(found.values()), is_problem=listed is None, meaning=meaning)
        if listed is not None:
            index = splits[split]
            assert isinstance(index, ImageIndex)
            gone = {index.paths[position] for position in found}
            for name, paths in listed[split].items():
                listed[split][name] = [path for path in paths if path not in gone]
    if listed is not None and any(measured.faults.values()):
        empty = tuple(name for name, paths in listed["train"].items() if not paths)
        yield ImageFinding("class without usable images", "train", empty, meaning="add some, or remove it")
        if not any(listed["val"].values()):
            yield _nothing_to_validate("val")


def _nothing_to_validate(where: str) -> ImageFinding:
    cases = ("no class has an image left for validation",)
    return ImageFinding("no validation images", where, cases, meaning="add images")


def _summary(folder: Path, what: str, splits: Splits, measured: SampleStatistics | None) -> Iterator[str]:
    counts = " and ".join(
        f"{len(images):,} to {word}" for word, images in zip(("train", "validate"), splits.values(), strict=True)
    )
    yield printable(f"{folder}: {what}; {len(splits['train'].classes):,} classes, images {counts}")
    if measured is not None:
        short, long = measured.short_side_pixels, measured.long_side_pixels
        yield (
            f"{measured.num_usable:,} of {measured.num_images:,} decoded: sides of {short.smallest:,} to "
            f"{long.largest:,} pixels, {short.median:,.0f} x {long.median:,.0f} in the median"
        )


def _write(
    recipe: Path,
    splits: Splits,
    listed: Listed,
    measured: SampleStatistics,
    *,
    arguments: argparse.Namespace,
    made: Mapping[str, object],
) -> None:
    """Write the list, if there is one, and then the recipe; made: how the splits were made, for the list.

    Raises: DataError; ConfigError, before any write.
    """
    folder: Path = arguments.folder
    root, counts = folder, {split: len(images) for split, images in splits.items()}
    if listed is not None:
        root = recipe.with_suffix(".json")
        counts = {split: sum(map(len, by_class.values())) for split, by_class in listed.items()}
    text = recipe_text(
        arguments.like,
        measured,
        root=str(root),
        num_classes=len(splits["train"].classes),
        counts=counts,
        seed=arguments.seed,
        max_megapixels=arguments.max_megapixels,
    )
    try:
        if listed is not None:
            write_list(root, folder, listed, **made)
        write_whole(recipe, text.encode())
    except OSError as error:
        raise DataError(f"{recipe}: cannot be written ({error.strerror}); name another --out") from error


def _next_commands(recipe: Path, splits: Splits, *, is_listed: bool) -> Iterator[str]:
    config = load_config(["--config", str(recipe)])
    also = f" and {config.data.root}" if is_listed else ""
    yield printable(f"written: {recipe}{also}; next:")
    example = splits["val"].name(0)
    if not os.path.isfile(example):  # it is the name of a sample in a shard
        example = "IMAGE.jpg"
    paths = (config.data.root, str(recipe), config.run.directory, example)
    root, config_file, run, image = (f"./{path}" if path.startswith("-") else path for path in paths)
    for words in (["data", "check", root], ["train", "--config", config_file], ["predict", run, image]):
        yield f"  bigbatch {' '.join(map(_shell_quoted, words))}"
    yield "on several GPUs put `launch local --` before train, on several machines see `bigbatch launch --help`"


def _shell_quoted(word: str) -> str:
    """Return a word quoted for a shell; unprintable characters as byte escapes of bash and zsh."""
    if word.isprintable():
        return shlex.quote(word)
    is_plain = [c.isprintable() and c not in "\\'" for c in word]
    characters = zip(word, is_plain, strict=True)
    code = (c if plain else "".join(f"\\x{byte:02x}" for byte in os.fsencode(c)) for c, plain in characters)
    return f"$'{''.join(code)}'"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch init",
        usage="bigbatch init FOLDER [OPTION ...]",
        description="Look at the images of FOLDER and write a recipe for them that extends a packaged one. They lie "
        "as FOLDER/train/<class>/ and FOLDER/val/<class>/, in WebDataset's shards, as FOLDER/<class>/, or anywhere in "
        "FOLDER with a CSV of labels. A list beside the recipe states the splits, unless they are train/ and val/; no "
        "image is copied or moved. All problems are reported at once; then nothing is written, and the exit code "
        "is 1.",
        epilog="example: bigbatch init data/flowers --val-share 0.2",
    )
    parser.add_argument("folder", type=as_path, metavar="FOLDER", help="folder of the images")
    parser.add_argument(
        "--out",
        type=as_path,
        metavar="FILE",
        help="the recipe to write, .yaml or .yml (default: <name of FOLDER>.yaml)",
    )
    parser.add_argument("--force", action="store_true", help="replace a recipe and a list that exist")
    parser.add_argument(
        "--like",
        default="imagenette",
        metavar="NAME",
        help="packaged experiment to extend (default: %(default)s); or a run folder or timm:NAME, whose model and "
        "weights the recipe fine-tunes",
    )
    parser.add_argument(
        "--labels",
        type=as_path,
        metavar="CSV",
        help="the table of labels (default: the one in FOLDER that names images); folders: none, FOLDER's folders are "
        "the classes",
    )
    parser.add_argument(
        "--columns",
        type=two_names,
        metavar="IMAGE,CLASS",
        help="names of the table's columns (default: those with known names, or both of two)",
    )
    parser.add_argument(
        "--val-share",
        type=decimal,
        default=0.2,
        metavar="SHARE",
        help="share of each class for validation, if FOLDER has no splits (default: %(default)s)",
    )
    parser.add_argument("--seed", type=whole, default=0, help="seed of split and sample (default: %(default)s)")
    parser.add_argument(
        "--samples",
        type=whole,
        default=2000,
        metavar="N",
        help="most images to decode for sizes, mean and std (default: %(default)s)",
    )
    parser.add_argument(
        "--leave-out",
        action="store_true",
        help="leave out unusable listed images, labels without an image, images without a label, and empty classes",
    )
    parser.add_argument("--workers", type=whole, default=len(usable_cores()), help="processes (default: %(default)s)")
    add_max_megapixels(parser)
    return parser
