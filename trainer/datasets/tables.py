"""Unpack Hugging Face's image data sets on disk (Arrow or Parquet) into class folders, by pyarrow alone."""

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.errors import DataError, pip_install, shortened
from bigbatch.files import parse_json, read_plain
from bigbatch.trainer.datasets.check import ImageFinding
from bigbatch.trainer.datasets.generated import UNFINISHED, removing_leftovers
from bigbatch.trainer.datasets.prepare import StoredImage, write_images
from bigbatch.trainer.datasets.processes import Advance

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
"""Data sets' name of a split -> split of a run."""
SPLIT_LIST = "dataset_dict.json"
SPLIT_STATE = "state.json"
"""Files that `datasets` writes into a folder of saved splits, and into that of a split."""
MAGIC = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp"}
BATCH_ROWS = 64
"""Rows, each with an image, in memory at a time."""
NUM_THREADS = 4
"""Writing threads: writing to a cluster's file system is mostly waiting."""


@dataclass(frozen=True)
class Tables:
    """Files of a folder to read, and the names of ignored splits."""

    files: Mapping[str, Sequence[Path]]
    """Split (train or val; "" if the folder is not divided) -> its files."""
    others: Sequence[str] = ()
    """Names of splits that a run does not read, such as test."""


def find_tables(folder: Path) -> Tables | None:
    """Return the files of `datasets.save_to_disk`, or Parquet files; None if there are none. Raises: DataError."""
    found = _saved(folder) or _parquet(folder)
    if not found:
        return None
    files: dict[str, list[Path]] = defaultdict(list)
    for name in found:
        if name in SPLIT_NAMES:
            files[SPLIT_NAMES[name]] += found[name]
    others = [name for name in found if name not in SPLIT_NAMES]
    if files.keys() == {"train", "val"}:
        return Tables(files, others)
    if "train" in files:  # a test set is not used for validation: the choice of the model would depend on it
        return Tables({"": files["train"]}, others)
    if len(found) == 1:
        return Tables({"": next(iter(found.values()))})
    raise DataError(f"{folder}: holds the splits {', '.join(found)}, and none is called train: name the folder of one")


def unpack_tables(
    folder: Path,
    tables: Tables,
    target: Path,
    *,
    columns: tuple[str, str] | None,
    on_progress: Advance,
    leave_out: bool,
) -> list[ImageFinding]:
    """Write target/<class>/<image>, below train/ and val/ if tables has both; target appears once it is whole.

    columns: those of image and label, if the files do not state them. on_progress gets (bytes done, bytes in all).
    Returns findings on rows without an image or a label. Raises: DataError for a damaged file, an existing target, and
    files without an image.
    """
    if os.path.lexists(target):
        raise DataError(f"{target}: exists; remove it, or name another ROOT")
    lacking: list[str] = []
    paths = [path for files in tables.files.values() for path in files]
    sizes = {path: path.stat().st_size if path.is_file() else 0 for path in paths}
    done, total = 0, sum(sizes.values())
    try:
        with (
            removing_leftovers(target),
            tempfile.TemporaryDirectory(
                suffix=UNFINISHED, prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
            ) as own,
        ):
            hidden = Path(own, "images")  # own has mode 700, while target gets the mode by the umask
            for split, files in tables.files.items():
                for number, path in enumerate(files):
                    images = _rows(path, number=number, columns=columns, lacking=lacking)
                    for _ in write_images(hidden / split, images, num_threads=NUM_THREADS):
                        pass
                    done += sizes[path]
                    on_progress(done, total)
            if not hidden.is_dir():
                none = f"{folder}: no row holds an image ({', '.join(MAGIC.values())}) with its label"
                raise DataError("; ".join((none, *lacking[:1])))
            os.replace(hidden, target)
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror}); name another folder") from error
    where, meaning = str(folder), "left out" if leave_out else f"left out of {target}"
    kind, alone = "row without an image or its label", "not read: a run trains and validates"
    return [
        ImageFinding(kind, where, tuple(lacking), is_problem=not leave_out, meaning=meaning),
        ImageFinding("other splits", where, tuple(tables.others), is_problem=False, meaning=alone),
    ]


def _saved(folder: Path) -> dict[str, list[Path]]:
    if (folder / SPLIT_LIST).is_file():
        return {name: _files_of(folder / name) for name in _read_json(folder / SPLIT_LIST, "splits") if _is_plain(name)}
    return {folder.name: _files_of(folder)} if (folder / SPLIT_STATE).is_file() else {}


def _files_of(folder: Path) -> list[Path]:
    files = (each for each in _read_json(folder / SPLIT_STATE, "_data_files") if isinstance(each, dict))
    return [folder / each["filename"] for each in files if _is_plain(each.get("filename"))]


def _read_json(path: Path, key: str) -> list[Any]:
    try:
        return list(parse_json(read_plain(path))[key])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path}: is not as `datasets` writes it ({shortened(error)}); save the data set again"
        ) from error


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and is_folder_name(name)


def _parquet(folder: Path) -> dict[str, list[Path]]:
    """Return split -> files, by folders, else by names such as train-00000-of-00002.parquet; data/ is not a split."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((*folder.glob("[!.]*.parquet"), *folder.glob("[!.]*/[!.]*.parquet"))):
        own = path.stem.partition("-")[0]
        is_named = path.parent in (folder, folder / "data")
        found[own if is_named and "-" in path.stem else path.parent.name].append(path)
    return dict(found)


def _rows(path: Path, *, number: int, columns: tuple[str, str] | None, lacking: list[str]) -> Iterator[StoredImage]:
    try:
        import pyarrow as pa
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise DataError(f"{path}: reading it needs pyarrow: {pip_install('huggingface')}") from error
    try:
        with pa.memory_map(str(path)) as file:
            if path.suffix == ".parquet":
                table = parquet.ParquetFile(file)
                schema = table.schema_arrow
                image, label, names = _columns(path, schema, columns)
                batches = table.iter_batches(BATCH_ROWS, columns=[image, label])
            else:
                batches = ipc.open_stream(file)
                image, label, names = _columns(path, batches.schema, columns)
            row = 0
            for batch in batches:
                for cell, value in zip(batch.column(image), batch.column(label), strict=True):
                    row += 1
                    stored, class_name = cell.as_py(), _class_of(value.as_py(), names)
                    # bytes, or {"bytes": ..., "path": ...}; a path without bytes is outside of the table
                    held = stored.get("bytes") if isinstance(stored, dict) else stored
                    data = held if isinstance(held, bytes) else b""
                    suffix = next((MAGIC[magic] for magic in MAGIC if data.startswith(magic)), None)
                    if suffix is None or not is_folder_name(class_name):
                        what = suffix or f"{image} holds {shortened(stored)}"
                        lacking.append(f"{path.name}: row {row}: {what}, {label} {shortened(class_name)}")
                        continue
                    yield f"{class_name}/{number:06d}-{row:06d}{suffix}", data
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:  # text that is not a UTF-8, an odd date
        raise DataError(
            f"{path}: is damaged, or neither Arrow nor Parquet ({error}); fetch or save it again"
        ) from error


def _columns(path: Path, schema: Any, columns: tuple[str, str] | None) -> tuple[str, str, Sequence[str] | None]:
    """Return the columns of images and labels, and the class names of integer labels. Raises: DataError."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        features = {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        features = {}
    if columns is None:
        kinds = {name: features.get(name, {}).get("_type") for name in schema.names}
        found = [[name for name in kinds if kinds[name] == kind] for kind in ("Image", "ClassLabel")]
        if [len(names) for names in found] != [1, 1]:
            raise DataError(
                f"{path}: has the columns {', '.join(schema.names)}, and does not say which hold images and labels: "
                "give --columns IMAGE,LABEL"
            )
        columns = (found[0][0], found[1][0])
    if missing := [name for name in columns if name not in schema.names]:
        raise DataError(f"{path}: has no column {missing[0]!r}; it has {', '.join(schema.names)}")
    if twice := [name for name in columns if schema.names.count(name) > 1]:
        raise DataError(f"{path}: has several columns {twice[0]!r}; save it with one")
    names = features.get(columns[1], {}).get("names")
    return (*columns, names if isinstance(names, list) else None)


def _class_of(value: object, names: Sequence[str] | None) -> str:
    if names is None:
        return "" if value is None else str(value)
    name = names[value] if isinstance(value, int) and 0 <= value < len(names) else ""
    return name if isinstance(name, str) else ""


def is_folder_name(label: str) -> bool:
    """Return whether a label can name a subfolder on any file system."""
    return label.isprintable() and "/" not in label and not label.startswith(".") and 0 < len(label.encode()) < 200
