"""Detect the layout of a folder of images, and split the images if the folder does not."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigbatch.errors import DataError, shortened
from bigbatch.trainer.datasets.check import (
    ImageFinding,
    class_findings,
    left_out_findings,
    list_folder,
    listing_findings,
    open_listing,
)
from bigbatch.trainer.datasets.tables import find_tables
from bigbatch.trainer.init.labels import read_labels
from bigbatch.trainer.input.base import ImageSource
from bigbatch.trainer.input.image_files import IMAGE_SUFFIXES, is_image, list_below, list_split
from bigbatch.trainer.input.listed import SPLITS
from bigbatch.trainer.input.order import ImageIndex
from bigbatch.trainer.input.shard_files import is_packed
from bigbatch.trainer.input.shards import DataRoot
from bigbatch.trainer.input.webdataset import find_shards

_LAYOUTS = "FOLDER/<class>/<image>, FOLDER/train and FOLDER/val with class folders, or images and a CSV of labels"

SPLIT_WORDS = ("training", "valid", "validation", "validate", "dev", "eval", "evaluation", "test", "testing")
"""Names that other programs give to folders of splits: init does not take them for classes."""


@dataclass(frozen=True)
class DatasetLayout:
    """Contents of a folder, and its faults."""

    what: str
    findings: tuple[ImageFinding, ...]
    splits: Mapping[str, ImageSource] | None = None
    """Both splits, if the folder has them."""
    by_class: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Otherwise class -> images, as paths below the folder."""


def find_layout(
    folder: Path, *, labels: Path | None = None, columns: tuple[str, str] | None = None, leave_out: bool
) -> DatasetLayout:
    """Return the layout of folder, without reading any image. labels: the CSV of labels; None: the only one in folder.

    columns: names of its columns of images and labels; None: the first two. leave_out: images without a label and
    labels without an image are no problem. Raises: DataError if the images cannot be listed.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder}: {'is a file' if folder.exists() else 'does not exist'}; name the folder of the images"
        )
    top = list_split(folder)
    folders = top.folders
    if find_tables(folder):
        how = f"`bigbatch data prepare huggingface TARGET --archives {folder}`, then `bigbatch init TARGET`"
        raise DataError(f"{folder}: is a data set of Hugging Face's: unpack it into class folders by {how}")
    if labels is None and (shards := find_shards(folder)):
        require_no_columns(folder, columns)
        if missing := {*SPLITS} - {*shards}:
            raise DataError(f"{folder}: holds shards for {next(iter(shards))}, and none for {missing.pop()}: add those")
        return _both_splits(folder, leave_out=leave_out)
    if any(name.endswith(".tar") for name in top.others):
        how = "name WebDataset's shards *train*.tar and *val*.tar, or put them into train/ and val/"
        raise DataError(f"{folder}: holds tar files, and none is named train or val: {how}")
    tables = [labels] if labels else [folder / name for name in top.others if name.lower().endswith(".csv")]
    if labels is None:
        splits = [split for split in SPLITS if split in folders and _is_split(folder / split)]
        if len(splits) == len(SPLITS):
            require_no_columns(folder, columns)
            return _both_splits(folder, leave_out=leave_out)
        if splits:
            (has,), (lacks,) = splits, {*SPLITS} - {*splits}
            hint = f"; to split it, name {folder / has}" if has == "train" else ""
            raise DataError(f"{folder}: holds {has}/ and no {lacks}/ with class folders: add that{hint}")
        if misnamed := [name for name in folders if name.lower() in SPLIT_WORDS and _is_split(folder / name)]:
            raise DataError(
                f"{folder}: {misnamed[0]}/ holds class folders, and a run reads train/ and val/: rename the folders of "
                "the two splits so, and move others elsewhere"
            )
    num_loose = sum(map(is_image, top.loose))
    if tables and (labels or num_loose or len(folders) < 2):
        return _by_csv(folder, tables, columns=columns, leave_out=leave_out)
    if num_loose > 0:
        raise DataError(
            f"{folder}: holds {num_loose:,} images that are in no class folder, and no CSV: give --labels FILE, "
            "with a line for each image (its name, its class), or move them into a folder for each class"
        )
    require_no_columns(folder, columns)
    return _class_folders(folder, leave_out=leave_out)


def require_no_columns(folder: Path, columns: tuple[str, str] | None) -> None:
    """Raise DataError if --columns is given but nothing would read it."""
    if columns is not None:
        raise DataError(
            f"--columns {','.join(columns)}: no table of {folder} is read; name one by --labels, or leave it out"
        )


def _is_split(folder: Path) -> bool:
    """Return whether folder is a split, and not a class such as train, whose images lie in train/ directly."""
    return is_packed(folder) or bool(list_split(folder).folders)


def _both_splits(folder: Path, *, leave_out: bool) -> DatasetLayout:
    data = DataRoot(folder)
    listings = {split: open_listing(data, split) for split in SPLITS}
    splits = {split: listing.images for split, listing in listings.items()}
    findings = class_findings(data.name, splits)
    for split, listing in listings.items():
        findings += listing_findings(split, listing, leave_out=leave_out)
    return DatasetLayout("train and val", tuple(findings), splits=splits)


def _class_folders(folder: Path, *, leave_out: bool) -> DatasetLayout:
    listing = list_folder(folder)
    images, where = listing.images, str(folder)
    assert isinstance(images, ImageIndex)
    by_class: dict[str, list[str]] = {name: [] for name in images.classes}
    for path in images.paths:
        by_class[path.partition("/")[0]].append(path)
    findings = listing_findings(where, listing, leave_out=leave_out)
    empty = tuple(f"{folder / name}" for name, paths in by_class.items() if not paths)
    advice = f"fill or remove it, or give --leave-out; an image ends in {', '.join(IMAGE_SUFFIXES)}"
    meaning = "left out" if leave_out else advice
    findings.append(ImageFinding("class without images", where, empty, is_problem=not leave_out, meaning=meaning))
    by_class = {name: paths for name, paths in by_class.items() if paths or not leave_out}
    if not by_class:
        findings.append(ImageFinding("no images", where, (f"{folder}: expected {_LAYOUTS}",), is_problem=True))
    return DatasetLayout("class folders", tuple(findings), by_class=by_class)


def _by_csv(folder: Path, tables: Sequence[Path], *, columns: tuple[str, str] | None, leave_out: bool) -> DatasetLayout:
    if len(tables) > 1:
        names = ", ".join(path.name for path in tables[:5])
        raise DataError(f"{folder}: holds {len(tables)} CSV files ({names}): name that of the labels by --labels")
    below = list_below(folder)
    table = read_labels(tables[0], below.images, columns=columns)
    by_class: dict[str, list[str]] = defaultdict(list)
    for path, label in table.labels.items():
        by_class[label].append(path)
    meaning = "left out" if leave_out else "fix the table, or give --leave-out"
    findings = [
        ImageFinding(kind, str(tables[0]), tuple(cases), is_problem=not leave_out, meaning=meaning)
        for kind, cases in table.faults.items()
    ]
    left_out = {kind: [f"{folder}/{path}" for path in paths] for kind, paths in below.left_out().items()}
    findings += left_out_findings(str(folder), left_out, unlisted=below.unlisted, leave_out=leave_out)
    names = f", its first line taken for column names: {shortened(table.names)}" if table.names else ""
    return DatasetLayout(f"images with labels from {tables[0].name}{names}", tuple(findings), by_class=by_class)


def split_classes(
    by_class: Mapping[str, Sequence[str]], *, val_share: float, seed: int
) -> dict[str, dict[str, list[str]]]:
    """Return split -> class -> images; val gets the val_share of each class with the lowest hashes of (seed, path).

    A class of two or more images has at least one in both splits; the only image of a class goes to train.
    """

    def draw(path: str) -> bytes:
        return hashlib.blake2b(f"{seed}/".encode() + os.fsencode(path), digest_size=16).digest()

    splits: dict[str, dict[str, list[str]]] = {"train": {}, "val": {}}
    for name, paths in by_class.items():
        ranked = sorted(paths, key=draw)
        num_val = min(len(paths) - 1, max(1, round(val_share * len(paths))))
        splits["val"][name], splits["train"][name] = ranked[:num_val], ranked[num_val:]
    return splits
