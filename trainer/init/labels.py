"""Read tables of labels: class and split of each image, lines without an image, and images without a line."""

import csv
import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from bigbatch.errors import DataError, shortened
from bigbatch.files import open_plain
from bigbatch.trainer.init.columns import (
    NAME_THEM,
    Columns,
    choose_columns,
    image_column,
    may_name_image,
    number_in,
    split_in,
    unknown_split,
)
from bigbatch.trainer.init.image_names import ImageNames
from bigbatch.trainer.input.image_files import is_image

MAX_TABLE_BYTES, MAX_LINE_CHARACTERS = 1 << 29, 1 << 17
"""Limits of a table and of a line: a table of 14 million images has some 400 MB, a line of 10,000 classes 20 kB."""
SAMPLE_ROWS = 200
"""Lines by which the columns are chosen."""
MIN_GUESSED = 8
"""From so many images on, a column that the user has not named must have fewer classes than half of the images."""
LOST, BLANK, LONG = "label without an image", "line without a label", "line with too many cells"
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


@dataclass(frozen=True)
class Table:
    """A table that is being read."""

    path: Path
    names: Sequence[str]
    """Of its columns; "" each if its first line is that of an image."""
    columns: Columns
    rows: Iterator[tuple[int, list[str]]]
    """Number and cells of each line."""


def read_labels(
    tables: Mapping[Path, str],
    images: ImageNames,
    *,
    columns: tuple[str, str] | None = None,
    split_of: Callable[[str], str] = lambda image: "",
) -> Labels:
    """Read tables in UTF-8 with a line for each image: cells separated by commas, semicolons or tabs.

    tables: table -> split of its images, "" if its name states none. columns: names of the columns of images and
    classes. split_of: split of an image, by its folder. Raises: DataError for a table of another form.
    """
    found = Labels()
    for path, split in tables.items():
        table = open_table(path, images, columns=columns)
        _add_rows(table, found, images, split=split)
        found.columns[path] = _describe(table)
    if not found.classes:
        case = next(iter(found.faults[LOST].values()), "it has no further line")
        where = f"{next(iter(tables))}: no line names one of the {len(images.images):,} images beside it"
        raise DataError(f"{where}; {case}: {NAME_THEM}")
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


def names_images(path: Path, images: ImageNames, *, but: Set[str]) -> bool:
    """Return whether a table's column of images names one that is not in `but`. Raises: DataError."""
    names, at, rows = _begin(path, images)
    cells = (row[at] for _, row in rows if at < len(row) and may_name_image(names[at], row[at].strip()))
    named = (images.find(cell, beside=path.parent) for cell in cells)
    return any(image is not None and image not in but for image in named)


def has_classes(path: Path, images: ImageNames, *, columns: tuple[str, str] | None) -> bool:
    """Return whether it is clear which column of a table holds the classes of images."""
    try:
        return bool(open_table(path, images, columns=columns))
    except DataError:
        return False


def open_table(path: Path, images: ImageNames, *, columns: tuple[str, str] | None = None) -> Table:
    """Open a table and choose its columns. Raises: DataError."""
    names, image, rows = _begin(path, images, has_names=columns is not None)
    if len(names) < 2:
        how = "separated by a comma, semicolon or tab: the image's name and its class"
        raise DataError(f"{path}: {'has one column' if names else 'is empty'}; give it two, {how}")
    sample = list(islice(rows, SAMPLE_ROWS))
    try:
        chosen = choose_columns(names, [row for _, row in sample], image=image, wanted=columns)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    return Table(path, names, chosen, chain(sample, rows))


def _begin(
    path: Path, images: ImageNames, *, has_names: bool = False
) -> tuple[Sequence[str], int, Iterator[tuple[int, list[str]]]]:
    """Return the names of a table's columns, the position of that of images, and its lines. Raises: DataError.

    has_names: its first line is one of names, even if it names images.
    """
    rows = _read(path)
    sample = list(islice(rows, SAMPLE_ROWS))
    if not sample:
        return [], 0, rows
    first = [cell.strip() for cell in sample[0][1]]

    def is_named(row: Sequence[str], column: str, at: int) -> bool:
        may_name = at < len(row) and may_name_image(column, row[at].strip())
        return may_name and images.find(row[at], beside=path.parent) is not None

    if not has_names and any(is_named(first, "", at) or is_image(cell) for at, cell in enumerate(first)):
        names = [""] * len(first)
    else:
        names, *sample = first, *sample[1:]
    num_named = [sum(is_named(row, column, at) for _, row in sample) for at, column in enumerate(names)]
    return names, image_column(names, num_named), chain(sample, rows)


def _read(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines that are not empty, with their numbers."""
    try:
        with open_plain(path) as file:
            if (num_bytes := os.fstat(file.fileno()).st_size) > MAX_TABLE_BYTES:
                what = f"{num_bytes:,} bytes, more than {MAX_TABLE_BYTES:,}"
                raise DataError(f"{path}: has {what}: keep its columns of images and classes alone, or move it away")
            lines = _lines(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
            first = next(lines, "")
            reader = csv.reader(chain([first], lines), delimiter=max(",;\t", key=first.count), strict=True)
            yield from ((reader.line_num, row) for row in reader if any(row))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its name and permissions") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is not a CSV in UTF-8 ({error}); save it as such a file") from error


def _lines(text: io.TextIOBase) -> Iterator[str]:
    while line := text.readline(MAX_LINE_CHARACTERS):
        if len(line) == MAX_LINE_CHARACTERS and line[-1] != "\n":
            raise csv.Error(f"a line has more than {MAX_LINE_CHARACTERS:,} characters")
        yield line


def _add_rows(table: Table, found: Labels, images: ImageNames, *, split: str) -> None:
    """Add the lines of a table to found. Raises: DataError."""
    names, at, faults = table.names, table.columns, found.faults
    partners: dict[tuple[int, bool, str], str] = {}
    for number, row in table.rows:
        cells = [cell.strip() for cell in row] + [""] * (len(names) - len(row))
        where, line = f"{table.path.name} line {number}", f"{table.path.name} line {number}: {shortened(row)}"
        if any(cells[len(names) :]):
            faults[LONG][where] = line
            continue
        if at.split is not None:
            split = split_in(cells[at.split])
            if cells[at.split] and not split:
                raise DataError(f"{table.path} line {number}: {unknown_split(names[at.split], cells[at.split])}")
        if not (label := _label(table, cells, partners, number=number)):
            faults[BLANK][where] = line
        elif (image := images.find(cells[at.image], beside=table.path.parent)) is None:
            outside = f", which is not below {images.folder}" if cells[at.image].startswith("/") else ""
            faults[LOST][where] = f"{where}: {cells[at.image]}{outside}"
        elif (before := found.classes.setdefault(image, label)) != label:
            faults[TWICE][image] = f"{where}: {image} is {before} and {label}"
        elif (before := found.splits.setdefault(image, split)) != split:
            faults[MOVED][image] = f"{where}: {image} is in {before or 'no split'} and {split or 'no split'}"


def _label(table: Table, cells: Sequence[str], partners: dict[tuple[int, bool, str], str], *, number: int) -> str:
    """Return the class that a line states, "" if none. Raises: DataError if it states several.

    partners: (column, direction, class) -> the same class in another column; one that is new is added.
    """
    names, (first, *others) = table.names, table.columns.labels
    if table.columns.one_hot:
        numbers = {names[at]: number_in(cells[at]) for at in table.columns.labels}
        classes = [name for name in numbers if numbers[name] != 0]
        if len(classes) > 1 or not {*numbers.values()} <= {0, 1}:
            one = "a line needs 1 in the column of its class and 0 in the others: correct it, or " + NAME_THEM
            raise DataError(f"{table.path} line {number}: has the classes {shortened(classes)}; {one}")
        return "".join(classes)
    for at in others:
        for key, partner in (((at, True, cells[first]), cells[at]), ((at, False, cells[at]), cells[first])):
            if partners.setdefault(key, partner) != partner:
                both = f"{names[first]!r} and {names[at]!r}"
                raise DataError(f"{table.path} line {number}: its columns {both} state different classes: {NAME_THEM}")
    return cells[first]


def _require_classes(found: Labels, path: Path, *, is_guessed: bool) -> None:
    """Raise DataError if the labels are lists of classes, or measurements."""
    classes = {*found.classes.values()}
    for label in classes:
        for sign in "|;,+/ ":
            parts = [part.strip() for part in label.split(sign)]
            if len({*parts}) > 1 and (sign == "|" or classes.issuperset(parts)):
                one = "a run trains one class for each image: write one, or leave out such lines"
                raise DataError(f"{path}: the label {shortened(label)} holds several classes; {one}")
    if is_guessed and len(found.classes) >= MIN_GUESSED and 2 * len(classes) > len(found.classes):
        many = f"{len(classes):,} labels of {len(found.classes):,} images, such as {shortened(min(classes))}"
        raise DataError(f"{path}: has {many}: these are hardly classes; {NAME_THEM}")


def _describe(table: Table) -> str:
    at, names = table.columns, table.names
    if not any(names):
        return "no line of names"
    read = [at.image, *at.labels, *([] if at.split is None else [at.split])]
    unread = [name for number, name in enumerate(names) if name and number not in read]
    named = f"columns {' and '.join(repr(names[number]) for number in read[:4])}{' ...' if len(read) > 4 else ''}"
    return named + (f"; not read: {shortened(unread)}" if unread else "")
