"""Detect the layout of a folder of images, and split the images if the folder does not."""

import hashlib
import os
import posixpath
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bigbatch.errors import DataError
from bigbatch.tools.init.arrangement import AS_CLASSES, Arrangement, arrange, split_word
from bigbatch.tools.init.csv_table import has_classes, names_images
from bigbatch.tools.init.image_names import ImageNames
from bigbatch.tools.init.labels import read_labels
from bigbatch.trainer.datasets.check import (
    ImageFinding,
    class_findings,
    left_out_findings,
    list_folder,
    listing_findings,
    open_listing,
)
from bigbatch.trainer.datasets.tables import find_tables
from bigbatch.trainer.input.base import SPLITS, ImageSource
from bigbatch.trainer.input.data_root import DataRoot, is_packed
from bigbatch.trainer.input.image_files import IMAGE_SUFFIXES, Contents, list_below, list_split
from bigbatch.trainer.input.order import ImageIndex
from bigbatch.trainer.input.webdataset import find_shards

FOLDERS = Path("folders")
"""Value of --labels: the folders are the classes, whatever their names and tables."""
_LAYOUTS = "FOLDER/<class>/<image>, FOLDER/train and FOLDER/val with class folders, or images and a CSV of labels"

ByClass = Mapping[str, Sequence[str]]
"""Class -> images, as paths below the folder."""


@dataclass(frozen=True)
class DatasetLayout:
    """Contents of a folder, and its faults."""

    what: str
    findings: tuple[ImageFinding, ...]
    splits: Mapping[str, ImageSource] | None = None
    """Both splits, if a run can read them from the folder itself."""
    by_split: Mapping[str, ByClass] = field(default_factory=dict)
    """Otherwise the images of train and val, or of train alone if the folder and its tables do not divide them."""


def find_layout(
    folder: Path, *, labels: Path | None = None, columns: tuple[str, str] | None = None, leave_out: bool
) -> DatasetLayout:
    """Return the layout of folder, without reading any image.

    labels: the table of labels; None: those in folder that name images; FOLDERS: none. columns: names of its columns
    of images and labels; None: see choose_columns. leave_out: images without a label and labels without an image are
    no problem. Raises: DataError if the images cannot be listed, or their classes are unknown.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder}: {'is a file' if folder.exists() else 'does not exist'}; name the folder of the images"
        )
    list_split(folder)  # raises DataError if it cannot be listed
    if find_tables(folder):
        how = f"`bigbatch data prepare huggingface TARGET --archives {folder}`, then `bigbatch init TARGET`"
        raise DataError(f"{folder}: is a data set of Hugging Face's: unpack it into class folders by {how}")
    is_stated = labels is not None and labels != FOLDERS
    if not is_stated and (_holds_shards(folder) or any(is_packed(folder / split) for split in SPLITS)):
        require_no_columns(folder, columns)
        return _both_splits(folder, leave_out=leave_out)
    below = list_below(folder)
    if not below.images and any(name.endswith(".tar") for name in below.others):
        how = "name WebDataset's shards *train*.tar and *val*.tar, or put them into train/ and val/"
        raise DataError(f"{folder}: holds tar files, and none is named train or val: {how}")
    arrangement = arrange([*below.images, *below.unread])
    tables = [labels] if labels else _tables_beside(folder, below, arrangement)
    if labels == FOLDERS:
        tables, arrangement = [], Arrangement("", classes={"": ""}) if arrangement.problem else arrangement
    try:
        read = partial(_by_tables, is_stated=is_stated, columns=columns, leave_out=leave_out)
        if tables and (by_tables := read(folder, tables, below, arrangement)):
            return by_tables
    except DataError as error:
        if is_stated or not arrangement.classes:
            raise
        raise DataError(f"{error}; {AS_CLASSES}") from error
    require_no_columns(folder, columns)
    if arrangement.problem:
        raise DataError(f"{folder}: {arrangement.problem}")
    if arrangement.classes == {split: split for split in SPLITS}:
        found = _both_splits(folder, leave_out=leave_out)
    else:
        found = _by_folders(folder, below, arrangement, leave_out=leave_out)
    unread = ImageFinding("table that is not read", str(folder), tuple(map(str, tables)), False, "--labels reads one")
    return replace(found, findings=(*found.findings, unread))


def _holds_shards(folder: Path) -> bool:
    """Return whether folder holds WebDataset's shards. Raises: DataError if a split has none."""
    shards = find_shards(folder)
    if missing := {*SPLITS} - {*shards} if shards else None:
        raise DataError(f"{folder}: holds shards for {next(iter(shards))}, and none for {missing.pop()}: add those")
    return bool(shards)


def require_no_columns(folder: Path, columns: tuple[str, str] | None) -> None:
    """Raise DataError if --columns is given but nothing would read it."""
    if columns is not None:
        raise DataError(
            f"--columns {','.join(columns)}: no table of {folder} is read; name one by --labels, or leave it out"
        )


def _both_splits(folder: Path, *, leave_out: bool) -> DatasetLayout:
    data = DataRoot(folder)
    listings = {split: open_listing(data, split) for split in SPLITS}
    splits = {split: listing.images for split, listing in listings.items()}
    findings = class_findings(data.name, splits)
    for split, listing in listings.items():
        findings += listing_findings(split, listing, leave_out=leave_out)
    return DatasetLayout("train and val", tuple(findings), splits=splits)


def _by_folders(folder: Path, below: Contents, arrangement: Arrangement, *, leave_out: bool) -> DatasetLayout:
    by_split, findings = {}, []
    for split, place in arrangement.classes.items():
        by_split[split or "train"], own = _class_folders(folder, place, leave_out=leave_out)
        findings += own
    if arrangement.splits:
        findings.append(_unread([path for path in below.images if arrangement.split_of(path) not in by_split], folder))
    places = " and ".join(filter(None, arrangement.classes.values()))
    return DatasetLayout(f"class folders{f' of {places}' if places else ''}", tuple(findings), by_split=by_split)


def _unread(paths: Sequence[str], where: Path) -> ImageFinding:
    meaning = "a run trains and validates; to validate with a test split, call it val"
    return ImageFinding("image that is not read", str(where), tuple(paths), is_problem=False, meaning=meaning)


def _class_folders(folder: Path, place: str, *, leave_out: bool) -> tuple[ByClass, list[ImageFinding]]:
    """Return the images in the class folders of folder/place, and findings."""
    top, prefix = folder / place, f"{place}/" if place else ""
    listing = list_folder(top)
    images, where = listing.images, str(top)
    assert isinstance(images, ImageIndex)
    by_class: dict[str, list[str]] = {name: [] for name in images.classes}
    for path in images.paths:
        by_class[path.partition("/")[0]].append(prefix + path)
    findings = listing_findings(where, listing, leave_out=leave_out)
    empty = tuple(f"{top / name}" for name, paths in by_class.items() if not paths)
    advice = f"fill or remove it, or give --leave-out; an image ends in {', '.join(IMAGE_SUFFIXES)}"
    meaning = "left out" if leave_out else advice
    findings.append(ImageFinding("class without images", where, empty, is_problem=not leave_out, meaning=meaning))
    by_class = {name: paths for name, paths in by_class.items() if paths or not leave_out}
    if not by_class:
        findings.append(ImageFinding("no images", where, (f"{top}: expected {_LAYOUTS}",)))
    return by_class, findings


def _tables_beside(folder: Path, below: Contents, arrangement: Arrangement) -> list[Path]:
    """Return the tables in folder, and beside class folders or in folders of splits."""
    places = {"", arrangement.top, *arrangement.splits}
    tables = (path for path in below.others if path.lower().endswith((".csv", ".tsv")))
    return [folder / path for path in tables if posixpath.dirname(path) in places]


def _by_tables(
    folder: Path,
    tables: Sequence[Path],
    below: Contents,
    arrangement: Arrangement,
    *,
    is_stated: bool,
    columns: tuple[str, str] | None,
    leave_out: bool,
) -> DatasetLayout | None:
    """Return the layout that tables state; None if none states classes. is_stated: the user has named the table."""
    if below.unread and not below.images:
        how = "no loader reads them: save them as JPEG, PNG or WebP"
        raise DataError(f"{folder}: holds {len(below.unread):,} images such as {below.unread[0]}; {how}")
    is_test = {path: arrangement.split_of(path) == "test" for path in below.images}
    tests = [path for path in is_test if is_test[path]]
    images = ImageNames(folder, [path for path in is_test if not is_test[path]], others=tests)
    chosen = dict.fromkeys(tables, "") if is_stated else _choose_tables(tables, images, arrangement, columns=columns)
    if not chosen:
        return None
    is_sure = is_stated or not arrangement.classes
    found = read_labels(chosen, images, columns=columns, split_of=arrangement.split_of, is_sure=is_sure)
    names = " and ".join(map(str, chosen))
    meaning = "fix the table, or give --leave-out" + (f"; {AS_CLASSES}" if arrangement.classes else "")
    findings = [
        ImageFinding(kind, names, tuple(cases.values()), not leave_out, "left out" if leave_out else meaning)
        for kind, cases in found.faults.items()
    ]
    left_out = {kind: [f"{folder}/{path}" for path in paths] for kind, paths in below.left_out().items()}
    findings += left_out_findings(str(folder), left_out, unlisted=below.unlisted, leave_out=leave_out)
    by_split: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, label in found.classes.items():
        by_split[found.splits[path] or "train"][label].append(path)
    findings.append(_unread([path for paths in by_split.pop("test", {}).values() for path in paths], folder))
    if "train" not in by_split:
        raise DataError(f"{names}: states no image to train with; add some, or correct its splits")
    what = "; ".join(f"{path.name}, {read}" for path, read in found.columns.items())
    return DatasetLayout(f"images with labels from {what}", tuple(findings), by_split=by_split)


def _choose_tables(
    tables: Sequence[Path], images: ImageNames, arrangement: Arrangement, *, columns: tuple[str, str] | None
) -> dict[Path, str]:
    """Return the tables with classes of images, except images of test; each with the split that its name states.

    Raises: DataError if there are several, and their names do not state a split each.
    """
    found = [path for path in tables if any(image not in images.others for image in names_images(path, images))]
    if not found and arrangement.problem and len(tables) == 1 and not any(names_images(tables[0], images)):
        found = [*tables]  # to report why it names none
    is_divided, is_sure = bool(arrangement.classes and arrangement.splits), not arrangement.classes
    if len(found) > 1 or is_divided:
        known = [path for path in found if has_classes(path, images, wanted=columns, is_sure=is_sure)]
        found = known or ([] if is_divided else found)
    if len(found) < 2:
        return dict.fromkeys(found, "")
    places = [os.path.relpath(path, images.folder) for path in found]
    splits = [
        split_word(path.stem)[0] or arrangement.split_of(place) for path, place in zip(found, places, strict=True)
    ]
    if len({*splits}) < len(found) or "" in splits or "train" not in splits:
        names = ", ".join(path.name for path in found[:5])
        raise DataError(f"{images.folder}: holds {len(found)} CSV files ({names}): name that of the labels by --labels")
    return dict(zip(found, splits, strict=True))


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
