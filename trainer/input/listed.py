"""A list of images: a file that assigns the images of a folder to splits and classes, without moving them.

JSON, as `bigbatch init` writes it: {"version": 1, "folder": ..., "train": {class: [paths]}, "val": {class: [paths]}}.
The folder is relative to the list's folder, paths to the folder. Labels are positions in both splits' sorted classes.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bigbatch.errors import DataError, shortened
from bigbatch.files import LIST_BYTES, as_json, parse_json, read_plain, write_whole
from bigbatch.trainer.config.moved import RUN_LIST
from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.input.base import SPLITS
from bigbatch.trainer.input.image_files import require_one_spelling
from bigbatch.trainer.input.order import ImageIndex, require_same_classes

VERSION = 1
_REDO = "let `bigbatch init --force` write it again; for a run, restore its images.json"
_OTHERS = "to train on others, name another run.directory, and by --run.resume the checkpoint to start from"

ByClass = Mapping[str, Sequence[str]]
"""Class -> paths of its images relative to the folder, with / as separator."""


def keep_list(data: DataConfig, run: Path, *, is_resumed: bool, was_listed: bool = False) -> None:
    """Copy the list of data into a run folder, with the absolute path of the images.

    was_listed: the run that is resumed had a list, and so its copy, which alone tells the images of validation.
    Raises: DataError, also if the run is resumed and the copy is missing or lists other images; OSError.
    """
    path, copy = Path(data.list or data.root), run / RUN_LIST
    if was_listed and not copy.is_file():
        raise DataError(f"{copy} is missing, the list of the images with which the run began: restore it; {_OTHERS}")
    folder, splits = _read_list(path)
    if is_resumed and copy.is_file():
        require_same_list(path, copy, option="--data.list" if data.list else "--data.root")
    write_list(copy, Path(os.path.abspath(data.root if data.list else folder)), splits)


def require_same_list(path: Path, copy: Path, *, option: str = "--data.root") -> None:
    """Raise DataError for a list with other images in a class of a split than a run's copy."""
    if _sorted(_read_list(path)[1]) != _sorted(_read_list(copy)[1]):
        raise DataError(
            f"{path}: lists other images than {copy}, with which the run began; type {option} {copy} to continue with "
            f"those; {_OTHERS}"
        )


def _sorted(splits: Mapping[str, ByClass]) -> dict[str, dict[str, list[str]]]:
    return {s: {name: sorted(splits[s][name]) for name in sorted(splits[s])} for s in SPLITS}


def write_list(path: Path, folder: Path, splits: Mapping[str, ByClass], **made: object) -> None:
    """Write a list of both splits; made: facts on how the list was made, for readers. Raises: OSError.

    A relative folder is written relative to the list: both can be moved together.
    """
    seen = folder if folder.is_absolute() else os.path.relpath(folder, path.parent)
    content = {"version": VERSION, "folder": str(seen), "made": made, **_sorted(splits)}
    write_whole(path, (as_json(content, indent=0) + "\n").encode())


class ListRoot:
    """Root that is a list of images; folder replaces the one that the list states."""

    def __init__(self, path: Path, *, folder: str | None = None) -> None:
        self.path, self._folder = path, folder

    def open(self, split: str, *, classes: Sequence[str] | None = None) -> ImageIndex:
        return read_listed(self.path, split, classes=classes, folder=self._folder)

    def classes(self, split: str) -> tuple[str, ...]:
        """Return the classes of the list, which are those of both splits. Raises: DataError."""
        return _classes(_read_list(self.path)[1])


def read_listed(
    root: Path, split: str, *, classes: Sequence[str] | None = None, folder: str | None = None
) -> ImageIndex:
    """List a split of the list root, whose images are in its folder or in another one. Raises: DataError."""
    own_folder, splits = _read_list(Path(root))
    folder = folder or own_folder
    index = index_of(folder, splits, split)
    if classes is not None:
        require_same_classes(Path(root), found=index.classes, expected=classes)
    if not os.path.isdir(folder):
        how = "name the folder that holds them now by --data.root (training, evaluation)"
        raise DataError(f"{root}: its folder of images is missing: {folder}; {how}, or {_REDO}")
    if not index.paths:
        raise DataError(f"{root}: lists no image for {split}; {_REDO}")
    return index


def index_of(folder: str, splits: Mapping[str, ByClass], split: str) -> ImageIndex:
    """Return the images of one split; labels are positions in the classes of all splits."""
    classes, by_class = _classes(splits), splits[split]
    return ImageIndex(
        root=folder,
        classes=classes,
        paths=[path for name in classes for path in sorted(by_class.get(name, ()))],
        labels_N=np.repeat(np.arange(len(classes), dtype=np.int64), [len(by_class.get(name, ())) for name in classes]),
    )


def _leads_out(path: str) -> bool:
    """Return whether a relative path leads out of its folder, or can name no file. Symbolic links are not looked at.

    No file name can have a zero byte, or a surrogate that stands for no byte.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return True
    return not path or "\0" in path or path.startswith("/") or (".." in path and ".." in path.split("/"))


def _classes(splits: Mapping[str, ByClass]) -> tuple[str, ...]:
    return tuple(sorted({name for by_class in splits.values() for name in by_class}))


def _read_list(path: Path) -> tuple[str, dict[str, ByClass]]:
    try:
        content = parse_json(read_plain(path, most=LIST_BYTES), object_pairs_hook=_without_repeats)
        if (type(content["version"]), content["version"]) != (int, VERSION):  # True == 1
            raise DataError(f"{path}: has version {content['version']}, this bigbatch reads {VERSION}; {_REDO}")
        folder, splits = content["folder"], {split: content[split] for split in SPLITS}
        for paths in (paths for by_class in splits.values() for paths in by_class.values()):
            if not isinstance(paths, list):
                raise TypeError("the images of a class are not a list")
            for each in paths:
                if not isinstance(each, str) or _leads_out(each):
                    raise DataError(f"{path}: lists {shortened(each)}, which is not an image below its folder; {_REDO}")
        require_one_spelling(path, _classes(splits))
        return os.path.normpath(path.parent / folder), splits
    except FileNotFoundError as error:
        how = "restore it, or run `bigbatch init FOLDER`, or name another list or a folder"
        raise DataError(f"{path}: the list of images is missing; {how}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: is not a list of images ({shortened(error)}); name a folder, or {_REDO}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse repeated keys, which json would drop silently. Raises: ValueError."""
    content = dict(pairs)
    if len(content) < len(pairs):
        key, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{key!r} is stated {times} times")
    return content
