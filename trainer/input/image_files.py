"""Find the image files of a data set: one rule for training, checking, packing and making data sets.

An image is a visible file with a suffix of FORMATS, at any depth below its class folder. Hidden files and folders
are not part of a data set; if they hold images, they are counted as left out. A link to a folder is followed, unless
it leads back to a folder that contains it.
"""

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigbatch.errors import DataError

FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".jpe": "JPEG",
    ".jfif": "JPEG",
    ".jif": "JPEG",
    ".jfi": "JPEG",
}
"""Suffix of an image -> its format, by Pillow's name: those that all loaders decode."""
IMAGE_SUFFIXES = tuple(FORMATS)
_UNREAD = (
    "bmp dib tif tiff gif ppm pgm pbm pnm pfm heic heif hif avif jxl jp2 j2k jpf jpx jpm jxr mpo pjpeg pjp apng tga "
    "pcx ico svg psd xcf exr hdr dcm dng cr2 cr3 nef arw orf raf rw2 raw eps sgi ras xbm xpm"
)
UNREAD_SUFFIXES = tuple(f".{name}" for name in _UNREAD.split())
"""Suffixes of images that no loader decodes: a data set that holds some is smaller than it looks."""
_ADDED = r"([0-9_~ -]+|\.([0-9]+|bak|old|orig|tmp|part|\w*download))"
_RENAMED = re.compile(rf"({'|'.join(map(re.escape, IMAGE_SUFFIXES))}){_ADDED}$", re.IGNORECASE)
"""Ends of the names of backup copies and unfinished downloads, such as .jpg~ and .JPG.1."""

_Below = tuple[str, tuple[str, ...]]
"""A folder below the listed one, and the folders with the links that were followed on the way to it."""


@dataclass
class Contents:
    """Entries of a folder or, from list_below, at any depth below it, by kind; all paths are relative to the folder."""

    images: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    """Visible folders; none from list_below, which descends into them."""
    unread: list[str] = field(default_factory=list)
    """Images whose suffix is of a format that no loader decodes."""
    loose: list[str] = field(default_factory=list)
    """From list_split: images outside of all class folders."""
    bad_links: list[str] = field(default_factory=list)
    """Links that are broken, or lead back to a folder that contains them."""
    renamed: list[str] = field(default_factory=list)
    """Images with something added to their suffix, such as .jpg~."""
    concealed: list[str] = field(default_factory=list)
    """Hidden images, and hidden folders that hold some."""
    hidden: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    """One line for each folder that cannot be listed."""

    def left_out(self) -> dict[str, list[str]]:
        """Return the files that look like images but are not read, by kind: a suffix, or the reason."""
        kinds = defaultdict(list)
        for path in self.unread:
            kinds[os.path.splitext(path)[1].lower()].append(path)
        named = {"in no class folder": self.loose, "behind a broken or circular link": self.bad_links}
        named |= {"with text after the suffix": self.renamed, "hidden": self.concealed}
        return kinds | {kind: paths for kind, paths in named.items() if paths}


_OF_SYSTEMS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
"""Names of folders that systems make: macOS in archives, Synology, Windows and Linux on their disks."""


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, such as the ._NAME that macOS leaves on other file systems."""
    return name.startswith(".") or name in _OF_SYSTEMS


def is_image(name: str) -> bool:
    """Return whether a file of this name is an image of a data set."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not is_hidden(name)


def list_split(folder: Path | str) -> Contents:
    """List the folders of classes in folder, and images beside them as loose. Raises: DataError if that fails."""
    found = Contents()
    found.folders = [path for path, _ in _scan(str(folder), "", (), found)]
    if found.unlisted:
        raise DataError(found.unlisted[0])
    found.loose, found.images, found.unread = [*found.images, *found.unread], [], []
    return _sorted(found)


def list_below(folder: Path | str) -> Contents:
    """List the entries at any depth below a folder, such as a class folder, and the folders that cannot be listed.

    One scandir per folder, and no stat per file except for links that may be folders: ImageNet has 1.28 million files.
    """
    found = Contents()
    todo: list[_Below] = [("", ())]
    while todo:
        todo += _scan(str(folder), *todo.pop(), found)
    return _sorted(found)


def _scan(root: str, below: str, above: tuple[str, ...], found: Contents) -> Iterator[_Below]:
    """Sort the entries of one folder into found; yield its visible folders."""
    folder, prefix = (f"{root}/{below}", f"{below}/") if below else (root, "")
    images, rest = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:  # is_image written out: it would be called a million times
                name = entry.name
                if name.lower().endswith(IMAGE_SUFFIXES) and name[0] != ".":
                    images.append(name)
                else:
                    rest.append(entry)
        found.images += [prefix + name for name in images] if prefix else images
        for entry in rest:
            path = prefix + entry.name
            if is_hidden(entry.name):
                (found.concealed if _hides_images(entry) else found.hidden).append(path)
            elif entry.is_dir(follow_symlinks=False):
                yield path, above
            elif entry.is_symlink() and not os.path.isfile(entry.path):
                if _is_bad_link(entry.path, (*above, folder)):
                    found.bad_links.append(path)
                else:
                    yield path, (*above, folder)
            else:
                is_unread = entry.name.lower().endswith(UNREAD_SUFFIXES)
                kind = found.unread if is_unread else found.renamed if _RENAMED.search(entry.name) else found.others
                kind.append(path)
    except OSError as error:
        found.unlisted.append(f"{folder}: cannot be listed ({error.strerror}); check its permissions")


def _hides_images(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return any(is_image(name) for _, _, names in os.walk(entry.path) for name in names)
    return is_image(entry.name[1:]) and not entry.name.startswith("._")


def _is_bad_link(path: str, above: tuple[str, ...]) -> bool:
    target = os.path.realpath(path)
    return not os.path.isdir(path) or any(Path(os.path.realpath(each)).is_relative_to(target) for each in above)


def _sorted(found: Contents) -> Contents:
    for paths in vars(found).values():
        paths.sort()
    return found


RENAME_CLASS = "rename one, so that the class has one spelling everywhere"


def spelling_variants(names: Iterable[str]) -> list[str]:
    """Return a line per class that names spell in several ways, which differ in Unicode, width, case, spaces or zeros.

    A single letter and its capital are two classes: data sets of handwriting have both on purpose.
    """
    classes = defaultdict(set)
    for name in names:
        classes[class_key(name)].add(name)
    return [_quoted(sorted(spellings)) for spellings in classes.values() if len(spellings) > 1]


def require_one_spelling(where: Path, names: Sequence[str]) -> None:
    """Raise DataError if names hold two spellings of one class."""
    if twice := spelling_variants(names):
        more = f" (and {len(twice) - 1:,} more such classes)" if len(twice) > 1 else ""
        raise DataError(f"{where}: {twice[0]} are spellings of one class{more}; {RENAME_CLASS}")


def class_key(name: str) -> str:
    """Return what all spellings of a class have in common."""
    text = " ".join(unicodedata.normalize("NFKC", name).split())
    text = text if len(text) == 1 else unicodedata.normalize("NFKC", text.lower())
    number = re.fullmatch(r"0*(\d+)(\.0*)?", text)  # spreadsheets export 1 as 1.0
    return number[1] if number else text


def _quoted(spellings: Sequence[str]) -> str:
    named = " and ".join(map(repr, spellings))
    looks_alike = len({unicodedata.normalize("NFC", each) for each in spellings}) < len(spellings)
    return f"{named} ({' and '.join(map(ascii, spellings))})" if looks_alike else named
