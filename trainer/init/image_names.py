"""Find images of a folder by what tables call them."""

import os
import posixpath
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path


class ImageNames:
    """Images of a folder, by their paths, names, and names without suffix."""

    def __init__(self, folder: Path, images: Sequence[str], *, others: Sequence[str] = ()) -> None:
        """images, others: paths below folder; if a name fits one of both, it is that of images."""
        self.folder, self.images = folder, images
        self._roots = (os.path.abspath(folder), os.path.realpath(folder))
        self._known = _by_name(others) | _by_name(images)
        self._parents = {""}
        for parent in {posixpath.dirname(posixpath.dirname(image)) for image in (*images, *others)}:
            while parent not in self._parents:
                self._parents.add(parent)
                parent = posixpath.dirname(parent)

    def find(self, cell: str, *, beside: Path) -> str | None:
        """Return the image that a cell of a table names; None if it names none, or several. beside: the table's folder.

        A cell is a path below the folder, the end of one, or a path from the table or the root that leads into the
        folder. Suffix, Unicode form and the kind of slash may be others than the image's.
        """
        text = cell.strip()
        for path in dict.fromkeys((text, _composed(text), _composed(text).replace("\\", "/"))):
            if posixpath.basename(path) not in self._known:
                continue
            below = list(self._below(path, beside))
            if image := next(filter(None, map(self._known.get, below)), None):
                return image
            ends = [each for each in below if "/" in each]
            longer = {self._known.get(f"{parent}/{each}") for parent in self._parents for each in ends} - {None}
            if len(longer) == 1:
                return longer.pop()
        return None

    def _below(self, path: str, beside: Path) -> Iterator[str]:
        full = os.path.abspath(beside / path)
        yield from (full.removeprefix(f"{root}/") for root in self._roots if full.startswith(f"{root}/"))
        if not path.startswith("/"):
            yield posixpath.normpath(path)
        elif (real := os.path.realpath(full)).startswith(f"{self._roots[-1]}/"):
            yield real.removeprefix(f"{self._roots[-1]}/")


def _by_name(images: Sequence[str]) -> dict[str, str | None]:
    """Return name -> image; None if the name fits several."""
    known: dict[str, str | None] = {}
    for image in images:
        path = _composed(image)
        full = {path, posixpath.basename(path)}
        for name in (full | {posixpath.splitext(name)[0] for name in full}) - {image}:
            known[name] = None if name in known else image
    # last, since a whole path always names one image
    return known | {image: image for image in images}


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)
