"""Decide which columns of a table hold the images, their classes and their splits, by names and by the first lines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bigbatch.errors import shortened
from bigbatch.tools.init.arrangement import SPLIT_WORDS, split_word

_ENDS = ("", "s", "id", "index", "name", "names")
_IMAGES = [word + end for word in ("image", "img", "file", "path") for end in (*_ENDS, "path", "paths", "filename")]
_CLASSES = [word + end for word in ("label", "class", "category", "wnid", "synset") for end in (*_ENDS, "es", "label")]
IMAGE_NAMES = {*_IMAGES, "id", "idcode", "isicid", "name"}
CLASS_NAMES = {*_CLASSES, "target", "species", "breed", "diagnosis", "dx", "disease", "findinglabels", "imagelabel"}
_OTHERS = "width height size area age fold folds kfold patient subject lesion url md hash date time score weight mask"
OTHER_NAMES = {word + end for word in _OTHERS.split() for end in _ENDS}
"""Columns that are not taken for classes, even beside that of images alone."""
SPLIT_NAMES = {"split", "splits", "datasplit", "set", "subset", "partition", "traintest", "trainval"}
SPLIT_NAMES |= {f"is{word}" for word in SPLIT_WORDS}
"""Names of columns, as small letters alone; a column of splits is also known by its cells."""
NAME_THEM = "name its columns by --columns IMAGE,CLASS"


@dataclass(frozen=True)
class Columns:
    """Positions of a table's columns."""

    image: int
    labels: Sequence[int]
    """Columns of classes: one, and others that state the same classes by other names; or the columns of one_hot."""
    one_hot: bool = False
    """Whether each class has a column, with 1 for its images and 0 for others."""
    split: int | None = None

    @property
    def read(self) -> Sequence[int]:
        """Return all of these positions."""
        return [self.image, *self.labels, *([] if self.split is None else [self.split])]


def may_name_image(column: str, cell: str) -> bool:
    """Return whether a cell of a column may name an image.

    A number does so only in a column known for images: else the epochs of a training's log would name 1.jpg, 2.jpg ...
    """
    return not cell.isdigit() or not column or _key(column) in IMAGE_NAMES


def image_column(names: Sequence[str], num_named: Sequence[int]) -> int:
    """Return the column of images; num_named: how many of the first lines name one in each column."""
    is_known = [_key(name) in IMAGE_NAMES for name in names]
    ranks = [(num_named[at] > 0 and is_known[at], num_named[at], is_known[at]) for at in range(len(names))]
    return ranks.index(max(ranks)) if ranks else 0


def choose_columns(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    image: int,
    wanted: tuple[str, str] | None,
    is_sure: bool = True,
) -> Columns:
    """Return the columns of a table. names: of its columns, "" each if it has none; rows: the first of its lines.

    image: the column that names the images. wanted: names of the columns of images and classes, if the user gave them.
    is_sure: the table states classes, so that one column beside image needs no known name. Raises: ValueError.
    """
    if wanted:
        for name in wanted:
            if names.count(name) != 1:
                what = f"{names.count(name)} columns" if name in names else "no column"
                raise ValueError(f"has {what} {name!r}; its first line names {shortened(names)}")
        image, *labels = map(names.index, wanted)
        return Columns(image, labels, split=_split_column(names, rows, besides=(image, *labels)))
    keys = [_key(name) for name in names]
    labels = [at for at, key in enumerate(keys) if key in CLASS_NAMES and at != image]
    # names, if another column has the numbers of the same classes
    labels.sort(key=lambda at: all(number_in(cell) is not None for cell in _cells(rows, at)))
    split = _split_column(names, rows, besides=(image, *labels))
    # spreadsheets and pandas write line numbers into a first column without a name
    is_index = [any(names) and (not name or key == "unnamed") for name, key in zip(names, keys, strict=True)]
    rest = [at for at in range(len(names)) if at not in (image, split) and not is_index[at]]
    if labels or (len(rest) == 1 and (is_sure or not any(names)) and keys[rest[0]] not in OTHER_NAMES):
        return Columns(image, labels or rest, split=split)
    if any(names) and len(rest) > 1 and all(number_in(cell) in (0, 1) for at in rest for cell in _cells(rows, at)):
        return Columns(image, rest, one_hot=True, split=split)
    what = f"has the columns {shortened(names)}" if any(names) else f"has {len(names)} columns without names"
    raise ValueError(f"{what}, and none is known for classes: {NAME_THEM}")


def _split_column(names: Sequence[str], rows: Sequence[Sequence[str]], *, besides: Sequence[int]) -> int | None:
    """Return the column that assigns images to splits; None without one. Raises: ValueError."""
    for at in (at for at in range(len(names)) if at not in besides):
        cells = [cell for cell in _cells(rows, at) if cell]
        odd = [cell for cell in cells if not split_in(cell)]
        if cells and not odd and any(names):
            return at
        if odd and _key(names[at]) in SPLIT_NAMES:
            raise ValueError(unknown_split(names[at], odd[0]))
    return None


def split_in(cell: str) -> str:
    """Return the split that a cell states; "" if none."""
    split, rest = split_word(cell)
    return "" if rest else split


def unknown_split(name: str, cell: str) -> str:
    """Return the message for a cell in the column of splits that names none."""
    remedy = "write train, val or test into it, or rename the column"
    return f"its column {name!r} holds {shortened(cell)}, which is no name of a split: {remedy}"


def number_in(cell: str) -> float | None:
    """Return the number in a cell, 0 if it is empty; None if it holds other text."""
    try:
        return float({"": "0", "true": "1", "false": "0"}.get(cell.lower(), cell))
    except ValueError:
        return None


def _key(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


def _cells(rows: Sequence[Sequence[str]], at: int) -> list[str]:
    return [row[at].strip() if at < len(row) else "" for row in rows]
