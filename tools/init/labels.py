"""Read tables of labels: class and split of each image, lines without an image, and images without a line."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigbatch.errors import DataError, shortened
from bigbatch.tools.init.columns import NAME_THEM, Columns, number_in, split_in, unknown_split
from bigbatch.tools.init.csv_table import Table, open_table
from bigbatch.tools.init.image_names import ImageNames

MIN_GUESSED = 8
"""From so many images on, a column that the user has not named must have fewer classes than half of the images."""
NO_LABEL = ("", "nan", "<na>", "null")
"""Cells without a label, as pandas and databases write them, in small letters."""
TWICE, MOVED, UNDIVIDED = "image with two labels", "image in two splits", "image without a split"


@dataclass(frozen=True)
class Labels:
    """Contents of tables of labels."""

    classes: dict[str, str] = field(default_factory=dict)
    """Path of an image -> its class."""
    splits: dict[str, str] = field(default_factory=dict)
    """Path of an image -> its split; "" if none is stated."""
    faults: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """Kind of fault -> line or image -> its case."""
    columns: dict[Path, str] = field(default_factory=dict)
    """Table -> which of its columns were read."""


def read_labels(
    tables: Mapping[Path, str],
    images: ImageNames,
    *,
    columns: tuple[str, str] | None = None,
    split_of: Callable[[str], str] = lambda image: "",
    is_sure: bool = True,
) -> Labels:
    """Read tables with a line for each image.

    tables: table -> split of its images, "" if its name states none. columns: names of the columns of images and
    classes. split_of: split of an image, by its folder. is_sure: see choose_columns. Raises: DataError.
    """
    found = Labels()
    for path, split in tables.items():
        table = open_table(path, images, has_names=columns is not None)
        chosen = table.columns(columns, is_sure=is_sure)
        _add_rows(table, chosen, found, images=images, split=split)
        unread = [name for at, name in enumerate(table.names) if name and at not in chosen.read]
        found.columns[path] = _describe(table.names, chosen, unread=unread)
        if columns is None and unread and all(map(str.isdigit, found.classes.values())):
            found.columns[path] += "; classes are numbers: --columns IMAGE,CLASS names other columns"
    if not found.classes:
        kinds = ("label without an image", "line without a label")
        case = next((case for kind in kinds for case in found.faults[kind].values()), "it has no further line")
        where = f"{next(iter(tables))}: no line states the class of one of the {len(images.images):,} images beside it"
        raise DataError(f"{where}; {case}: write paths below {images.folder}, and classes, or {NAME_THEM}")
    _require_classes(found, next(iter(tables)), is_guessed=columns is None)
    for image in found.classes:
        found.splits[image] = found.splits[image] or split_of(image)
    if any(found.splits.values()):
        found.faults[UNDIVIDED] |= {image: image for image, split in found.splits.items() if not split}
    unlabelled = (image for image in images.images if image not in found.classes)
    found.faults["image without a label"] |= {image: image for image in unlabelled}
    for image in {*found.faults[TWICE], *found.faults[MOVED], *found.faults[UNDIVIDED]}:
        del found.classes[image]
    return found


def _add_rows(table: Table, columns: Columns, found: Labels, *, images: ImageNames, split: str) -> None:
    """Add the lines of a table to found. Raises: DataError."""
    names, path, faults = table.names, table.path, found.faults
    stated: set[tuple[str, ...]] = set()
    for number, row in table.rows():
        where, cells = f"{path.name} line {number}", [*row, *[""] * (len(names) - len(row))]
        if any(cells[len(names) :]):
            faults["line with too many cells"][where] = f"{where}: {shortened(row)}"
            continue
        if columns.split is not None:
            split = split_in(cells[columns.split])
            if cells[columns.split] and not split:
                raise DataError(f"{path} line {number}: {unknown_split(names[columns.split], cells[columns.split])}")
        labels = [cells[at] for at in columns.labels]
        label = _marked(table, columns, labels, number=number) if columns.one_hot else labels[0]
        if label.lower() in NO_LABEL:
            faults["line without a label"][where] = f"{where}: {shortened(row)}"
            continue
        stated.add(() if columns.one_hot else tuple(labels))
        if (image := images.find(cells[columns.image], beside=path.parent)) is None:
            outside = f", which is not below {images.folder}" if cells[columns.image].startswith("/") else ""
            faults["label without an image"][where] = f"{where}: {cells[columns.image]}{outside}"
        elif (before := found.classes.setdefault(image, label)) != label:
            faults[TWICE][image] = f"{where}: {image} is {before} and {label}"
        elif (before := found.splits.setdefault(image, split)) != split:
            faults[MOVED][image] = f"{where}: {image} is in {before or 'no split'} and {split or 'no split'}"
    if any(len({*labels}) < len(stated) for labels in zip(*stated, strict=True)):
        both = " and ".join(repr(names[at]) for at in columns.labels)
        raise DataError(f"{path}: its columns {both} state different classes: {NAME_THEM}")


def _marked(table: Table, columns: Columns, cells: Sequence[str], *, number: int) -> str:
    """Return the class that a line of a table with a column for each class marks, "" if none. Raises: DataError."""
    numbers = [number_in(cell) for cell in cells]
    classes = [table.names[at] for at, each in zip(columns.labels, numbers, strict=True) if each != 0]
    if len(classes) > 1 or not {*numbers} <= {0, 1}:
        one = f"a line needs 1 in the column of its class, and 0 in the others: correct it, or {NAME_THEM}"
        raise DataError(f"{table.path} line {number}: has the classes {shortened(classes)}; {one}")
    return "".join(classes)


def _require_classes(found: Labels, path: Path, *, is_guessed: bool) -> None:
    """Raise DataError if the labels are lists of classes, or measurements."""
    classes = {*found.classes.values()}
    for label in classes:
        for sign in "|;,+/ ":
            parts = [part.strip() for part in label.split(sign)]
            if len({*parts}) > 1 and (sign == "|" or classes.issuperset(parts)):
                one = "a run trains one class for each image: write one, or leave out such lines"
                raise DataError(f"{path}: the label {shortened(label)} holds several classes; {one}")
    odd = [label for label in classes if (number_in(label) or 0) % 1]
    is_measured = odd and None not in map(number_in, classes)
    is_many = len(found.classes) >= MIN_GUESSED and 2 * len(classes) > len(found.classes)
    if is_guessed and (is_many or is_measured):
        many = f"{len(classes):,} labels of {len(found.classes):,} images, such as {shortened(min(odd or classes))}"
        raise DataError(f"{path}: has {many}: these are hardly classes; {NAME_THEM}")


def _describe(names: Sequence[str], columns: Columns, *, unread: Sequence[str]) -> str:
    """Return which columns are read, and which are not."""
    if not any(names):
        return "no line of names"
    read = columns.read
    first = f"columns {' and '.join(repr(names[at]) for at in read[:4])}{' ...' if len(read) > 4 else ''}"
    return first + (f"; not read: {shortened(unread)}" if unread else "")
