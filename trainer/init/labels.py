"""Read a CSV of labels: the class of each image, lines without an image, and images without a line."""

import csv
import io
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import DataError, shortened
from bigbatch.trainer.input.image_files import is_image


@dataclass(frozen=True)
class LabelFile:
    """Contents of a CSV of labels."""

    labels: dict[str, str]
    """Path of an image -> its class."""
    faults: dict[str, list[str]]
    """Kind of mismatch -> its cases, for each possible kind."""
    names: Sequence[str] | None
    """The first line, if it was taken for column names without --columns."""


def read_labels(path: Path, images: Sequence[str], *, columns: tuple[str, str] | None = None) -> LabelFile:
    """Read a CSV with a line for each of images (paths below a folder): comma, semicolon or tab, UTF-8.

    A line names an image by path or name, also without suffix, if only one image has it; it cannot name one outside of
    the folder. Raises: DataError for a file of another form.
    """
    known = _names(images)
    rows = _read(path)
    file_at, label_at = _positions(path, rows, columns)
    is_header = columns is not None or not (_find(rows[0][1][0], known) or is_image(rows[0][1][0].strip()))
    labels: dict[str, str] = {}
    lost, blank, twice = [], [], {}
    for number, row in rows[is_header:]:
        where = f"{path.name} line {number}"
        if len(row) <= max(file_at, label_at) or not row[label_at].strip():
            blank.append(f"{where}: {shortened(row)}")
            continue
        image, label = _find(row[file_at], known), row[label_at].strip()
        if image is None:
            lost.append(f"{where}: {row[file_at]}")
        elif labels.setdefault(image, label) != label:
            twice[image] = f"{where}: {image} is {labels[image]} and {label}"
    if not labels:
        raise DataError(
            f"{path}: no line names one of the {len(images):,} images beside it; it has {len(rows)} lines, the "
            f"first is {shortened(rows[0][1])}: name its columns by --columns IMAGES,LABELS"
        )
    return LabelFile(
        {image: label for image, label in labels.items() if image not in twice},
        {
            "label without an image": lost,
            "image without a label": [image for image in images if image not in labels],
            "line without a label": blank,
            "image with two labels": [*twice.values()],
        },
        names=rows[0][1] if is_header and columns is None else None,
    )


def _read(path: Path) -> list[tuple[int, list[str]]]:
    """Return non-empty lines with their numbers."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        first = text.partition("\n")[0]
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
        rows = [(reader.line_num, row) for row in reader if any(row)]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its name and permissions") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is not a CSV in UTF-8 ({error}); save it as such a file") from error
    if not rows:
        raise DataError(f"{path}: is empty; give it a line for each image: its name, its class")
    return rows


def _positions(path: Path, rows: Sequence[tuple[int, list[str]]], columns: tuple[str, str] | None) -> tuple[int, int]:
    first = [name.strip() for name in rows[0][1]]
    if columns is None and len(first) < 2:
        raise DataError(f"{path}: has one column, {first[0]!r}; give it two: the image's name and its class")
    missing = [name for name in columns or () if name not in first]
    if missing:
        raise DataError(f"{path}: has no column {missing[0]!r}; its first line names {shortened(first)}")
    return (first.index(columns[0]), first.index(columns[1])) if columns else (0, 1)


def _find(name: str, known: dict[str, str | None]) -> str | None:
    return known.get(posixpath.normpath(name.strip()))


def _names(images: Sequence[str]) -> dict[str, str | None]:
    """Return name -> image; None if the name fits several."""
    known: dict[str, str | None] = {}
    for image in images:
        shorter = {
            short for name in (image, posixpath.basename(image)) for short in (name, posixpath.splitext(name)[0])
        }
        for name in shorter - {image}:
            known[name] = None if name in known else image
    # last, since a whole path always names one image
    return known | {image: image for image in images}
