"""Find images of a folder by what tables call them."""

import os
import posixpath
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path


class ImageNames:
    """Images of a folder, by their paths, names, and names without suffix."""

    def __init__(self, folder: Path, images: Sequence[str], *, others: Sequence[str] = ()) -> None:
        """images, others: paths below folder; if a name fits one of both, it is that of images."""
        self.folder, self.images, self.others = folder, images, frozenset(others)
        self._roots = (os.path.abspath(folder), os.path.realpath(folder))
        self._known = _by_name(others) | _by_name(images)
        self._parents = {""}
        for parent in {posixpath.dirname(posixpath.dirname(image)) for image in (*images, *others)}:
            while parent not in self._parents:
                self._parents.add(parent)
                parent = posixpath.dirname(parent)
        self._place_of = lru_cache(maxsize=8)(lambda beside: next(self._below(f"{os.path.abspath(beside)}/"), ""))

    def find(self, cell: str, *, beside: Path) -> str | None:
        """Return the image that a cell of a table names; None if it names none, or several. beside: the table's folder.

        A cell is a path below the folder, the end of one, or a path from the table or the root that leads into the
        folder. Suffix, Unicode form and the kind of slash may be others than the image's.
        """
        place = self._place_of(beside)
        if image := (place and self._known.get(place + cell)) or self._known.get(cell):
            return image
        if cell.isascii() and "/" not in cell and "\\" not in cell:
            return None
        for path in dict.fromkeys((cell, _composed(cell), _composed(cell).replace("\\", "/"))):
            if posixpath.basename(path) not in self._known:
                continue
            full = os.path.abspath(beside / path)
            below = [*self._below(full), *([] if path.startswith("/") else [posixpath.normpath(path)])]
            below = below or list(self._below(os.path.realpath(full)))
            if image := next(filter(None, map(self._known.get, below)), None):
                return image
            ends = [each for each in below if "/" in each]
            longer = {self._known.get(f"{parent}/{each}") for parent in self._parents for each in ends} - {None}
            if len(longer) == 1:
                return longer.pop()
        return None

    def _below(self, full: str) -> Iterator[str]:
        return (full.removeprefix(f"{root}/") for root in self._roots if full.startswith(f"{root}/"))


def _by_name(images: Sequence[str]) -> dict[str, str | None]:
    """Return name -> image; None if the name fits several."""
    known: dict[str, str | None] = {}
    for image in images:
        path = _composed(image)
        name = path.rpartition("/")[2]
        for each in {path, name, path[: path.rfind(".")], name[: name.rfind(".")]} - {image}:
            known[each] = None if each in known else image
    # last, since a whole path always names one image
    return known | {image: image for image in images}


def _composed(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text)
