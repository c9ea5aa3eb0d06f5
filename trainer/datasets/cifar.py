"""CIFAR-10 and CIFAR-100: from the pickles of the official archive to pictures, without executing the pickles."""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from bigbatch.errors import DataError
from bigbatch.trainer.datasets.archives import Archive, Member, one_line, read_members
from bigbatch.trainer.datasets.class_folders import DataSet, StoredImage

_COUNTS = {"train": 50_000, "val": 10_000}
CIFAR10 = DataSet(
    name="cifar10",
    archives=(
        Archive(
            names=("cifar-10-python.tar.gz",),
            md5="c58f30108f718f92721af3b95e74349a",
            url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        ),
    ),
    num_classes=10,
    num_images=_COUNTS,
)
CIFAR100 = DataSet(
    name="cifar100",
    archives=(
        Archive(
            names=("cifar-100-python.tar.gz",),
            md5="eb9058c3a382ffc7106e4002c42a8d85",
            url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        ),
    ),
    num_classes=100,
    num_images=_COUNTS,
)

_BATCHES: dict[str, tuple[str, ...]] = {
    "train": (*(f"data_batch_{number}" for number in range(1, 6)), "train"),
    "val": ("test_batch", "test"),
}
"""The files of each split, in order: CIFAR-10's names, and CIFAR-100's."""
_SIDE = 32

# what an array is pickled as; the name of the module has changed since the archives were made
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def read_cifar(archive: Path) -> Iterator[StoredImage]:
    """Yield all pictures as PNG: <split>/<class>/<position in the split, five digits>.png.

    The classes are alphabetical in both sets, so that labels by sorted folders are the original ones.
    Raises: DataError if the archive is not as published.
    """
    batches = {member.path.name: _unpickle(member) for member in read_members(archive) if _is_known(member.path)}
    classes = _column(
        batches, ("batches.meta", "meta"), ("label_names", "fine_label_names"), kind=list, archive=archive
    )
    for split, names in _BATCHES.items():
        position = 0
        for name in (name for name in names if name in batches):
            labels = _column(batches, (name,), ("labels", "fine_labels"), kind=list, archive=archive)
            pixels_NP = _column(batches, (name,), ("data",), kind=np.ndarray, archive=archive)
            for image_HW3, label in zip(_images(pixels_NP, labels, archive=archive), labels, strict=True):
                yield f"{split}/{_class_name(classes, label, archive=archive)}/{position:05d}.png", _png(image_HW3)
                position += 1


def _is_known(path: PurePosixPath) -> bool:
    return path.name in {"batches.meta", "meta", *_BATCHES["train"], *_BATCHES["val"]}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds numbers, texts, lists and arrays; refuses to call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}")
        return _ALLOWED[module, name]


def _unpickle(member: Member) -> dict[str, Any]:
    data = member.read()
    try:
        return dict(_ArrayUnpickler(io.BytesIO(data), encoding="latin-1").load())
    except Exception as error:  # a damaged pickle raises almost anything
        raise DataError(f"{member}: is no CIFAR batch ({one_line(error)}); download the archive again") from error


def _column(
    batches: dict[str, dict[str, Any]], files: tuple[str, ...], keys: tuple[str, ...], *, kind: type, archive: Path
) -> Any:
    """Return the value of the first key in the first file that there is: both sets have their own names."""
    for name in files:
        for key in keys:
            if isinstance(value := batches.get(name, {}).get(key), kind):
                return value
    raise DataError(f"{archive}: holds no {' or '.join(keys)} in {' or '.join(files)}; download it again")


def _images(pixels_NP: np.ndarray, labels: list[Any], *, archive: Path) -> np.ndarray:
    """Turn planes of red, green and blue, row by row -> N x height x width x 3."""
    shape = (len(labels), 3 * _SIDE * _SIDE)
    if pixels_NP.shape != shape or pixels_NP.dtype != np.uint8:
        raise DataError(f"{archive}: a batch does not hold {shape[0]} x {shape[1]} bytes; download it again")
    return pixels_NP.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)


def _class_name(classes: list[Any], label: Any, *, archive: Path) -> str:
    """Return the label's class, which becomes the name of a folder."""
    name = classes[label] if isinstance(label, int) and 0 <= label < len(classes) else None
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise DataError(f"{archive}: label {label!r} names no class; download it again")
    return name


def _png(image_HW3: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image_HW3)).save(buffer, "PNG")
    return buffer.getvalue()
