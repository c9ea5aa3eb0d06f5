"""Writing ROOT/<split>/<class>/<picture>: a split stands under its name when it is complete, and not before."""

import errno
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bigbatch.errors import DataError
from bigbatch.files import parse_json, write_whole
from bigbatch.locks import open_lock, try_lock
from bigbatch.trainer.datasets.archives import Archive
from bigbatch.trainer.input.image_files import list_below, list_split

SOURCES = "prepared.json"
"""In ROOT: which data set each split came from. Two sizes of Imagenette differ in nothing else that is quick to see."""

StoredImage = tuple[str, bytes]
"""(path below the folder of all splits, encoded picture)."""

_PART = ".part"
"""The same for each run: its lock leaves one writer, which writes over what a killed one left."""

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What a file system without locks answers, such as Lustre mounted without them."""


@dataclass(frozen=True)
class DataSet:
    """Describes a published data set and what it must amount to."""

    name: str
    archives: tuple[Archive, ...]
    """One for each split in the order of num_images, then the development kit; or a single one for all."""
    num_classes: int
    num_images: Mapping[str, int]
    """Of each split."""


class ImageWriter:
    """Writes pictures in threads, since what takes time on a cluster's file system is waiting for it.

    An interrupted run leaves whole files only, and the next one goes on.
    """

    def __init__(self, folder: Path, *, num_threads: int, on_written: Callable[[int], None]) -> None:
        """Report to on_written the number of pictures that were added since the last call, written now or earlier."""
        self._folder = folder
        self._num_threads = num_threads
        self._on_written = on_written

    def write(self, images: Iterable[StoredImage]) -> None:
        """Write each picture to its path. Raises: DataError naming a path that cannot be written."""
        in_flight: deque[Future[None]] = deque()
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="bigbatch-write") as threads:
            for path, data in images:
                if len(in_flight) >= 4 * self._num_threads:  # keeps few pictures in memory
                    self._wait(in_flight)
                in_flight.append(threads.submit(_write_image, self._folder / path, data))
            while in_flight:
                self._wait(in_flight)

    def write_class(self, path: str, images: Iterable[StoredImage]) -> None:
        """Write the pictures, whose paths are names, to the folder at path, or nothing where it exists already."""
        folder = self._folder / path
        if os.path.isdir(folder):
            self._on_written(len(list_below(folder).images))
            return
        hidden = folder.with_name(f".{folder.name}")  # a whole folder, which files.replacing cannot set aside
        self.write((str(hidden.relative_to(self._folder) / name), data) for name, data in images)
        if not os.path.isdir(hidden):
            raise DataError(f"{folder}: its archive holds no picture; download the archive again")
        _rename(hidden, folder)

    def _wait(self, in_flight: deque[Future[None]]) -> None:
        in_flight.popleft().result()
        self._on_written(1)


def write_file(path: Path, data: bytes) -> None:
    """Write a file, or replace it, whole or not at all. Raises: DataError with the path."""
    try:
        _write(path, data)
    except OSError as error:
        raise _write_error(path, error) from error


def _write_image(path: Path, data: bytes) -> None:
    """Write a picture, unless its bytes are there; its length tells little, a machine may have crashed."""
    try:
        is_there = path.read_bytes() == data
    except OSError:  # whatever else is wrong, writing tells
        is_there = False
    if not is_there:
        write_file(path, data)


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data, mark=_PART)
    except FileNotFoundError:  # the first picture of its class
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, mark=_PART)


def _rename(old: Path, new: Path) -> None:
    """Give a class or a split its name, after which nobody reads it again."""
    os.sync()  # it must survive a power cut whole; 1,002 calls for ImageNet, where fsync would take 1.3 million
    try:
        os.replace(old, new)
    except OSError as error:
        raise _write_error(new, error) from error


def _write_error(path: Path, error: OSError) -> DataError:
    advice = "mend that and run the command again, it goes on where it stopped"
    return DataError(f"{path}: cannot be written ({error.strerror or error}); {advice}")


def unfinished_folder(root: Path, data_set: DataSet) -> Path:
    """Return where a data set grows, split by split; loaders do not look into it."""
    return root / f".{data_set.name}.unfinished"


@contextmanager
def only_run(root: Path, data_set: DataSet) -> Iterator[None]:
    """Make the unfinished folder and keep other runs from it; it goes when no split is left in it.

    Raises: DataError if another run writes there, or it cannot be made.
    """
    unfinished = unfinished_folder(root, data_set)
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        lock = open_lock(unfinished / "lock")
    except OSError as error:
        raise _write_error(unfinished, error) from error
    with lock:
        _lock(lock, unfinished)
        try:
            yield
        finally:
            if not class_names(unfinished):
                shutil.rmtree(unfinished, ignore_errors=True)


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        if not try_lock(file):
            raise DataError(f"{folder}: another run writes here; wait for its end, or name a new folder")
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise _write_error(folder, error) from error


def go_on_or_start_anew(root: Path, data_set: DataSet, *, split: str, archives: Sequence[Path]) -> None:
    """Throw away what an earlier run left of a split if one of its archives was replaced since.

    What is left may come from a damaged archive, and whole classes of it are not read again.
    Raises: DataError with the path.
    """
    unfinished = unfinished_folder(root, data_set) / split
    note = unfinished.with_suffix(".json")
    facts = _facts(archives)
    if _read_note(note) == facts:
        return
    try:
        if os.path.isdir(unfinished):
            shutil.rmtree(unfinished)
    except OSError as error:
        raise _write_error(unfinished, error) from error
    # after the removal: killed in between, the next run removes again
    write_file(note, json.dumps(facts).encode())


def _facts(archives: Sequence[Path]) -> dict[str, list[int]]:
    """Return what tells an archive from the one that replaces it: length and time of change, by name."""
    try:
        states = {path.name: path.stat() for path in archives}
    except OSError as error:  # hours after it was found: the other split was written since
        again = "bring it back and run the command again"
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); {again}") from error
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}


def missing_splits(root: Path, data_set: DataSet) -> list[str]:
    """Return the splits that are still to be written.

    Raises: DataError if one is there that is not complete or came from another data set.
    """
    missing = []
    for split in data_set.num_images:
        folder = root / split
        if not os.path.exists(folder) or not any(vars(list_split(folder)).values()):
            missing.append(split)
            continue
        source = _read_note(root / SOURCES).get(split, data_set.name)
        if source != data_set.name:
            raise DataError(f"{folder}: holds {source}, not {data_set.name}; name a new folder")
        if (problem := _wrong_counts(folder, data_set, split=split)) is not None:
            raise DataError(f"{folder}: {problem}; name a new folder, or delete this one")
    return missing


def finish_split(root: Path, data_set: DataSet, *, split: str) -> None:
    """Count what was written and give it its name. Raises: DataError if there is too little or too much."""
    unfinished = unfinished_folder(root, data_set)
    if (problem := _wrong_counts(unfinished / split, data_set, split=split)) is not None:
        raise DataError(f"{unfinished / split}: {problem}; delete it, download the archive again and repeat")
    sources = {**_read_note(root / SOURCES), split: data_set.name}
    # before the rename: a split under its name always has its source
    write_file(root / SOURCES, json.dumps(sources, indent=2).encode())
    _rename(unfinished / split, root / split)


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the class folders in folder; none where there is no such folder."""
    return list_split(folder).folders if os.path.isdir(folder) else []


def _wrong_counts(folder: Path, data_set: DataSet, *, split: str) -> str | None:
    """Return what is wrong with the number of classes or pictures; None where both are as published."""
    names = class_names(folder)
    found = sum(len(list_below(folder / name).images) for name in names)
    expected = data_set.num_images[split]
    if (len(names), found) == (data_set.num_classes, expected):
        return None
    return f"holds {found:,} of {expected:,} pictures in {len(names):,} of {data_set.num_classes:,} classes"


def _read_note(path: Path) -> dict[str, Any]:
    """Return what an earlier run wrote there; empty if none did."""
    try:
        return dict(parse_json(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it") from error
