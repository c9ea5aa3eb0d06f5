"""Open a table in UTF-8: names of its columns, the one that names images, and its lines."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from bigbatch.errors import DataError
from bigbatch.files import LIST_BYTES, TooLong, open_plain
from bigbatch.tools.init.columns import Columns, choose_columns, image_column, may_name_image
from bigbatch.tools.init.image_names import ImageNames
from bigbatch.trainer.input.image_files import is_image

MAX_LINE_CHARACTERS = 1 << 17
"""Limits of a table and of a line: a table of 14 million images has some 400 MB, a line of 10,000 classes 20 kB."""
SAMPLE_ROWS = 200
"""Lines by which the columns are chosen."""

Row = tuple[int, list[str]]
"""Number of a line, and its cells without the space around them."""


@dataclass(frozen=True)
class Table:
    """A table with its first lines."""

    path: Path
    names: Sequence[str]
    """Names of its columns: "" each if its first line is that of an image, none if it is empty."""
    image: int
    """Position of the column that names images."""
    first: Sequence[Row]
    rest: Iterator[Row]

    def rows(self) -> Iterator[Row]:
        """Yield the lines below the names of the columns, once."""
        return chain(self.first, self.rest)

    def columns(self, wanted: tuple[str, str] | None, *, is_sure: bool = True) -> Columns:
        """Choose the columns; wanted, is_sure: see choose_columns. Raises: DataError."""
        if len(self.names) < 2:
            how = "separated by a comma, semicolon or tab: the image's name and its class"
            raise DataError(
                f"{self.path}: {'has one column' if self.names else 'is empty'}; give it two columns, {how}"
            )
        try:
            rows = [row for _, row in self.first]
            return choose_columns(self.names, rows, image=self.image, wanted=wanted, is_sure=is_sure)
        except ValueError as error:
            raise DataError(f"{self.path}: {error}") from None


def open_table(path: Path, images: ImageNames, *, has_names: bool = False) -> Table:
    """Open a table: cells separated by commas, semicolons or tabs. Raises: DataError.

    has_names: its first line states the names of its columns, even if it names an image.
    """

    def is_named(column: str, cell: str) -> bool:
        return may_name_image(column, cell) and images.find(cell, beside=path.parent) is not None

    rest = _read(path)
    first = list(islice(rest, SAMPLE_ROWS))
    names = first[0][1] if first else []
    if not has_names and any(is_named("", cell) or is_image(cell) for cell in names):
        names = [""] * len(names)
    else:
        first = first[1:]
    num_named = [sum(at < len(row) and is_named(name, row[at]) for _, row in first) for at, name in enumerate(names)]
    return Table(path, names, image_column(names, num_named), first, rest)


def names_images(path: Path, images: ImageNames) -> Iterator[str]:
    """Yield the images that a table's column of images names. Raises: DataError."""
    table = open_table(path, images)
    for _, row in table.rows():
        cell = "".join(row[table.image : table.image + 1])
        if may_name_image(table.names[table.image], cell) and (image := images.find(cell, beside=path.parent)):
            yield image


def has_classes(path: Path, images: ImageNames, *, wanted: tuple[str, str] | None, is_sure: bool) -> bool:
    """Return whether it is clear which column of a table holds classes."""
    try:
        return bool(open_table(path, images, has_names=wanted is not None).columns(wanted, is_sure=is_sure))
    except DataError:
        return False


def _read(path: Path) -> Iterator[Row]:
    """Yield the lines that are not empty."""
    try:
        with open_plain(path, most=LIST_BYTES) as file:
            lines = _lines(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
            head = list(islice(lines, SAMPLE_ROWS))
            first = next(filter(str.strip, head), "")
            reader = csv.reader(chain(head, lines), delimiter=max(",;\t", key=first.count), strict=True)
            for row in reader:
                if any(cells := [cell.strip() for cell in row]):
                    yield reader.line_num, cells
    except TooLong as error:
        raise DataError(
            f"{path}: is too long ({error}): keep its columns of images and classes alone, or move it away"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its name and permissions") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is not a CSV in UTF-8 ({error}); save it as such a file") from error


def _lines(text: io.TextIOBase) -> Iterator[str]:
    while line := text.readline(MAX_LINE_CHARACTERS):
        if len(line) == MAX_LINE_CHARACTERS and line[-1] != "\n":
            raise csv.Error(f"a line has more than {MAX_LINE_CHARACTERS:,} characters")
        yield line
