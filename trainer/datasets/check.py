"""Check a data set: the contents of its splits, and their faults."""

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bigbatch.errors import DataError
from bigbatch.trainer.config.sections import IMAGENET_COUNTS
from bigbatch.trainer.datasets.check_image import IMAGE, PART_IMAGES, TRAITS, examine_part
from bigbatch.trainer.datasets.processes import Advance, in_parallel, show_nothing
from bigbatch.trainer.input.base import SPLITS, ImageSource
from bigbatch.trainer.input.data_root import INDEX, SETTINGS, DataRoot, is_packed
from bigbatch.trainer.input.formats import MAX_PIXELS
from bigbatch.trainer.input.image_files import (
    IMAGE_SUFFIXES,
    RENAME_CLASS,
    class_key,
    list_below,
    list_split,
    spelling_variants,
)
from bigbatch.trainer.input.order import ImageIndex
from bigbatch.trainer.input.shards import ENTRIES, read_packed
from bigbatch.trainer.input.webdataset import WebDatasetSplit

IMAGENET_CLASSES = 1000
MAX_RATIO = 3
"""Images of the largest class for each of the smallest, from which the check remarks on it; in ImageNet it is 1.8."""
COMPLETE: dict[str, dict[int, int | None]] = {
    "train": {IMAGENET_COUNTS["train"]: None},
    "val": {IMAGENET_COUNTS["val"]: 50, 10_000: 10},
}
"""Split -> complete number of images -> images per class, None if classes differ; 10,000 is ImageNet-V2's number."""


@dataclass(frozen=True)
class Listing:
    """Files of a split, found before any image is read."""

    images: ImageSource
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Kind -> paths of files that look like images but are not read."""
    nested: tuple[str, ...] = ()
    """Folders with images inside of class folders."""
    strays: tuple[str, ...] = ()
    """Paths of all other files, also hidden ones."""
    unlisted: tuple[str, ...] = ()
    """One line for each folder that cannot be listed."""


@dataclass(frozen=True)
class ImageFinding:
    """Cases of one kind of finding in one split or folder; none if there is nothing to report."""

    kind: str
    where: str
    cases: tuple[str, ...]
    """One line per case; most begin with a path."""
    is_problem: bool = True
    """False: a remark, which does not prevent training."""
    meaning: str = ""
    """Remedy, or effect on loading."""


@dataclass(frozen=True)
class Spread:
    """Extremes and median of a quantity over classes or images; zeros if there are none."""

    smallest: int = 0
    median: float = 0.0
    largest: int = 0


@dataclass(frozen=True)
class SplitFacts:
    """Contents of a split. Sides and forms count intact images only."""

    num_images: int
    num_classes: int
    num_bytes: int
    per_class: Spread
    short_side_pixels: Spread
    long_side_pixels: Spread
    forms: dict[str, int]
    """Number of images of each format, such as JPEG RGB, the most frequent first."""


@dataclass(frozen=True)
class CheckReport:
    """All results of a check."""

    root: str
    decoded: bool
    seconds: float
    splits: dict[str, SplitFacts]
    problems: tuple[ImageFinding, ...]
    remarks: tuple[ImageFinding, ...]


def check_dataset(
    root: Path,
    *,
    decode: bool = True,
    num_workers: int = 1,
    max_pixels: int = MAX_PIXELS,
    on_progress: Advance = show_nothing,
) -> CheckReport:
    """Check every image of root/train and root/val; on_progress gets the number done and the total.

    decode False reads all files, but decodes headers only: it misses damage inside of an image. An image of
    more than max_pixels is a fault, and not decoded.
    Raises: DataError if root has neither split, or is not a list of images; ConfigError for an impossible num_workers.
    """
    start = time.monotonic()
    data = DataRoot(root, retries=True)
    listings = {split: open_listing(data, split) for split in SPLITS if data.classes(split) is not None}
    if not listings:
        what = "holds neither train/ nor val/" if root.is_dir() else "is neither a folder nor a list of images"
        hint = "name the folder that contains train/ and val/, or the list that `bigbatch init` wrote"
        raise DataError(f"{root}: {what if root.exists() else 'does not exist'}; {hint}")
    splits = {split: listing.images for split, listing in listings.items()}
    total, num_done = sum(map(len, splits.values())), 0
    # an empty part first, so that concatenation works for a split without images
    rows: dict[str, list[np.ndarray]] = {split: [np.empty(0, IMAGE)] for split in splits}
    faults: dict[str, dict[str, list[str]]] = {split: {} for split in splits}
    tasks = [
        (split, range(first, min(first + PART_IMAGES, len(images))))
        for split, images in splits.items()
        for first in range(0, len(images), PART_IMAGES)
    ]
    work = partial(examine_part, splits, decode, max_pixels)
    for split, rows_N, found in in_parallel(work, tasks, num_workers=num_workers):
        rows[split].append(rows_N)
        for kind, reason in found:
            faults[split].setdefault(kind, []).append(reason)
        num_done += len(rows_N)
        on_progress(num_done, total)
    tables = {split: np.concatenate(parts) for split, parts in rows.items()}
    findings = class_findings(data.name, splits)
    for split, images in splits.items():
        findings += listing_findings(split, listings[split])
        findings += [ImageFinding(kind, split, tuple(each)) for kind, each in faults[split].items()]
        for bit, (trait, meaning) in enumerate(TRAITS.items()):
            cases = tuple(map(images.name, np.flatnonzero(tables[split]["traits"] >> bit & 1).tolist()))
            findings.append(ImageFinding(trait, split, cases, is_problem=False, meaning=meaning))
    findings += duplicate_findings(splits, tables)
    return CheckReport(
        root=data.name,
        decoded=decode,
        seconds=time.monotonic() - start,
        splits={split: split_facts(images, tables[split]) for split, images in splits.items()},
        problems=tuple(finding for finding in findings if finding.cases and finding.is_problem),
        remarks=tuple(finding for finding in findings if finding.cases and not finding.is_problem),
    )


def list_folder(folder: Path) -> Listing:
    """List folder/<class>/.../<image> by the loaders' rule, and all other files. Raises: DataError if it cannot."""
    top = list_split(folder)
    below = [list_below(folder / name) for name in top.folders]
    found = ImageIndex(
        root=str(folder),
        classes=tuple(top.folders),
        paths=[f"{name}/{image}" for name, each in zip(top.folders, below, strict=True) for image in each.images],
        labels_N=np.repeat(np.arange(len(below), dtype=np.int64), [len(each.images) for each in below]),
    )
    places = {str(folder): top, **{f"{folder}/{name}": each for name, each in zip(top.folders, below, strict=True)}}
    left_out: dict[str, list[str]] = defaultdict(list)
    for place, contents in places.items():
        for kind, paths in contents.left_out().items():
            left_out[kind] += [f"{place}/{path}" for path in paths]
    nested = {os.path.dirname(f"{place}/{path}") for place, each in places.items() for path in each.images}
    return Listing(
        found,
        left_out=left_out,
        nested=tuple(sorted(nested - places.keys())),
        strays=tuple(f"{place}/{path}" for place, each in places.items() for path in (*each.hidden, *each.others)),
        unlisted=tuple(line for each in places.values() for line in each.unlisted),
    )


def open_listing(data: DataRoot, split: str) -> Listing:
    """List the images of a split in any form, and in a folder all other files.

    Raises: DataError if the split cannot be listed.
    """
    folder = data.path / split
    if is_packed(folder):
        index = read_packed(folder)
        expected = {INDEX, ENTRIES, SETTINGS, *(shard.name for shard in index.facts.shards)}
        found = list_below(folder)
        beside = tuple(f"{folder}/{path}" for path in (*found.images, *found.unread))
        return Listing(
            index,
            left_out={"in no shard": beside} if beside else {},
            strays=tuple(f"{folder}/{path}" for path in sorted({*found.hidden, *found.others} - expected)),
            unlisted=tuple(found.unlisted),
        )
    if folder.is_dir() and not data.shards:
        return list_folder(folder)
    images = data.open(split)
    return Listing(images, left_out=images.left_out_samples if isinstance(images, WebDatasetSplit) else {})


def spread(values_N: np.ndarray) -> Spread:
    """Return the smallest, the median and the largest value."""
    if not len(values_N):
        return Spread()
    return Spread(int(values_N.min()), float(np.median(values_N)), int(values_N.max()))


def _class_counts(images: ImageSource) -> np.ndarray:
    return np.bincount(images.labels_N, minlength=len(images.classes))


def split_facts(images: ImageSource, rows_N: np.ndarray) -> SplitFacts:
    """Return counts and sizes of one split."""
    good_N = rows_N[rows_N["is_ok"]]
    return SplitFacts(
        num_images=len(images),
        num_classes=len(images.classes),
        num_bytes=int(rows_N["num_bytes"].sum()),
        per_class=spread(_class_counts(images)),
        short_side_pixels=spread(good_N["sides"].min(axis=1)),
        long_side_pixels=spread(good_N["sides"].max(axis=1)),
        forms={name.decode(): count for name, count in Counter(good_N["format"].tolist()).most_common()},
    )


def listing_findings(split: str, listing: Listing, *, leave_out: bool = False) -> list[ImageFinding]:
    """Return findings on files that are not read, and folders in class folders. leave_out: see left_out_findings."""
    below = "its images are of that class"
    return [
        *left_out_findings(split, listing.left_out, unlisted=listing.unlisted, leave_out=leave_out),
        ImageFinding("other files", split, listing.strays, is_problem=False, meaning="not read by the loaders"),
        ImageFinding("folder below a class", split, listing.nested, is_problem=False, meaning=below),
    ]


def left_out_findings(
    where: str, left_out: Mapping[str, Sequence[str]], *, unlisted: Sequence[str], leave_out: bool
) -> list[ImageFinding]:
    """Return findings on files that look like images but are not read, and on folders that cannot be listed.

    leave_out: the user chose to leave out these files, so they are not a problem.
    """
    findings = []
    for kind, paths in left_out.items():
        todo = "save it as JPEG, PNG or WebP, or move it away"
        if not kind.startswith("."):
            todo = "repair it, move it into the folder of its class, or move it away"
        meaning = "" if leave_out else todo
        findings.append(ImageFinding(f"image left out, {kind}", where, tuple(paths), not leave_out, meaning))
    return [*findings, ImageFinding("folder that cannot be listed", where, tuple(unlisted))]


def class_findings(root: str, splits: Mapping[str, ImageSource]) -> list[ImageFinding]:
    """Return findings on missing splits, classes without images or in one split only, and counts unlike ImageNet's."""
    missing = tuple(f"{root}/{split}: no such folder" for split in SPLITS if split not in splits)
    findings = [ImageFinding("missing split", root, missing, meaning="training reads train/, evaluation reads val/")]
    for split, images in splits.items():
        counts = _class_counts(images)
        empty = tuple(f"{root}/{split}/{name}" for name, count in zip(images.classes, counts, strict=True) if not count)
        meaning = f"fill or remove it; an image ends in {', '.join(IMAGE_SUFFIXES)}"
        # a list, and WebDataset's shards, name the classes of both splits
        is_problem = split == "train" or not (os.path.isfile(root) or isinstance(images, WebDatasetSplit))
        findings.append(ImageFinding("class without images", split, empty, is_problem=is_problem, meaning=meaning))
        findings.append(unprintable_finding(split, images.classes))
        if not images.classes:
            cases = (f"{root}/{split}: expected {split}/<class>/<image>",)
            findings.append(ImageFinding("no class folders", split, cases))
        for other in splits.keys() - {split}:
            has = set(map(class_key, splits[other].classes))  # another spelling is a finding of its own
            lacking = tuple(f"{root}/{split}/{name}" for name in images.classes if class_key(name) not in has)
            meaning = "give both splits the same class folders: a label is the position among them"
            findings.append(ImageFinding(f"class that {other} lacks", split, lacking, meaning=meaning))
        findings += [imagenet_finding(split, images), *([_imbalance(images, counts)] if split == "train" else [])]
    findings.append(spelling_finding(root, {name for images in splits.values() for name in images.classes}))
    return findings


def _imbalance(images: ImageSource, counts_K: np.ndarray) -> ImageFinding:
    """Return the finding on a training class with MAX_RATIO times the images of another."""
    filled_K = np.flatnonzero(counts_K)
    cases = []
    if len(filled_K) and counts_K.max() >= MAX_RATIO * counts_K[filled_K].min():
        small, large = filled_K[counts_K[filled_K].argmin()], counts_K.argmax()
        each = [f"{images.classes[label]} has {counts_K[label]:,} images" for label in (large, small)]
        cases.append(f"{each[0]}, {each[1]}: {counts_K[large] / counts_K[small]:.1f} times as many")
    meaning = (
        "set data.balance: 1 (draws rare classes more often; 0.5: half of it in logarithms), or weight the loss by "
        "optimizer.loss_options: {weight: balanced}; not both"
    )
    return ImageFinding("unequal classes", "train", tuple(cases), is_problem=False, meaning=meaning)


def spelling_finding(where: str, classes: Iterable[str]) -> ImageFinding:
    """Return the finding on classes with two spellings, in one split or across both."""
    return ImageFinding("class with two spellings", where, tuple(spelling_variants(classes)), meaning=RENAME_CLASS)


def unprintable_finding(where: str, classes: Sequence[str]) -> ImageFinding:
    """Return the finding on class names with unprintable characters."""
    odd = tuple(name for name in classes if not name.isprintable())
    return ImageFinding("class with an unprintable name", where, odd, meaning="give it another one")


def imagenet_finding(split: str, images: ImageSource) -> ImageFinding:
    """Return how 1,000 classes named by WordNet ids differ in number from complete ILSVRC-2012 or ImageNet-V2."""
    is_wnid = re.compile(r"n\d{8}").fullmatch
    is_imagenet = len(images.classes) == IMAGENET_CLASSES and all(map(is_wnid, images.classes))
    cases, known = [], COMPLETE[split]
    if is_imagenet and len(images) not in known:
        cases.append(f"{len(images):,} images instead of {' or '.join(f'{count:,}' for count in known)}")
    elif is_imagenet and (per_class := known[len(images)]):
        cases += [
            f"{name}: {count} images instead of {per_class}"
            for name, count in zip(images.classes, _class_counts(images).tolist(), strict=True)
            if count != per_class
        ]
    meaning = (
        "accuracies are comparable only for the whole set: 1,281,167 images in train and 50,000 in val, 50 of each "
        "class; 10,000 and 10 in ImageNet-V2"
    )
    return ImageFinding("not ImageNet's counts", split, tuple(cases), is_problem=False, meaning=meaning)


def equal_groups(digests_N2: np.ndarray) -> list[list[int]]:
    """Return positions that share a digest, in groups of two and more, each in ascending order."""
    # sorting makes equal digests neighbours, without a dict of a million keys
    order_N = np.lexsort((digests_N2[:, 1], digests_N2[:, 0]))
    is_new_N = np.ones(len(order_N), bool)
    is_new_N[1:] = (digests_N2[order_N[1:]] != digests_N2[order_N[:-1]]).any(axis=1)
    starts = np.flatnonzero(is_new_N)
    stops = np.append(starts[1:], len(order_N))
    return sorted(order_N[start:stop].tolist() for start, stop in zip(starts, stops, strict=False) if stop - start > 1)


def duplicate_findings(splits: Mapping[str, ImageSource], tables: Mapping[str, np.ndarray]) -> list[ImageFinding]:
    """Return findings on duplicate images: in both train and val a problem, within a split a remark."""
    good = {split: np.flatnonzero(rows_N["is_ok"]) for split, rows_N in tables.items()}
    owners = np.repeat(list(good), [len(positions) for positions in good.values()])
    positions_N = np.concatenate(list(good.values()))
    meanings = {
        "same image in train and val": "leakage: the accuracy would be too good; remove it from one of them",
        "same image in several classes": "at most one of its labels can be right",
        "same image twice": "counts once for each copy",
    }
    leak, relabelled, twice = meanings
    found: dict[tuple[str, str], list[str]] = {}
    for group in equal_groups(np.concatenate([tables[split]["digest"][good[split]] for split in good])):
        members = [(str(owners[number]), int(positions_N[number])) for number in group]
        where = sorted({split for split, _ in members})
        labels = {int(splits[split].labels_N[position]) for split, position in members}
        kind = leak if len(where) > 1 else relabelled if len(labels) > 1 else twice
        case = " = ".join(splits[split].name(position) for split, position in members)
        found.setdefault((kind, " and ".join(where)), []).append(case)
    return [ImageFinding(kind, where, tuple(c), kind == leak, meanings[kind]) for (kind, where), c in found.items()]
