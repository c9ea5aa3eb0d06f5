"""Unpack official archives to ROOT/<split>/<class>/<image>. A split gets its name only once it is whole and counted."""

import errno
import io
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bigbatch.errors import DataError, StorageError
from bigbatch.files import as_json, parse_json, read_plain, write_new, write_whole
from bigbatch.locks import open_lock, try_lock
from bigbatch.trainer.config.sections import IMAGENET_COUNTS
from bigbatch.trainer.datasets.archives import Archive, ArchiveMember, check_md5, download, find_archive, read_members
from bigbatch.trainer.datasets.show_progress import Report
from bigbatch.trainer.input.formats import MAX_PIXELS
from bigbatch.trainer.input.image_files import is_image, list_below, list_split

SOURCES = "prepared.json"
"""File in ROOT that states each split's data set: nothing else distinguishes two sizes of Imagenette quickly."""

StoredImage = tuple[str, bytes]
"""(path relative to the folder of all splits, encoded image)."""

MAX_IN_FLIGHT_BYTES = 64 << 20
"""Limit of the bytes of images that wait for a writing thread; one more image may exceed it."""

_PART = ".part"
"""Suffix of unfinished files, equal in all runs: the lock allows one writer, which overwrites a killed run's files."""
_NOT_OFFICIAL = "this is not the official archive"
_WNID = re.compile(r"n\d{8}")
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


@dataclass(frozen=True)
class DataSet:
    """A published data set and its expected counts."""

    name: str
    archives: Mapping[str, Archive]
    """Name of a split, or of all splits together -> its archive; another key -> an archive that every split needs."""
    num_classes: int
    num_images: Mapping[str, int]
    """Number of images of each split."""
    read: Callable[["DataSet", Mapping[str, Path], str], Iterator[StoredImage]]
    """(data set, archives, key of the archive to read) -> its images."""
    max_pixels: int = MAX_PIXELS
    """A member with more bytes than such an image takes is refused."""

    def members(self, archive: Path | ArchiveMember) -> Iterator[ArchiveMember]:
        """Yield the files of an archive; refuses more members than the data set can need. Raises: DataError."""
        max_members = 2 * sum(self.num_images.values()) + 10_000
        return read_members(archive, max_members=max_members, max_pixels=self.max_pixels)


def prepare(
    root: Path,
    data_set: DataSet,
    *,
    archives: Path | None,
    with_md5: bool = False,
    num_threads: int = 8,
    on_progress: Report,
) -> list[str]:
    """Write the missing splits, and return them; needs only their archives.

    archives: folder of the archives; None: they are downloaded to root/archives, and kept.
    Continues an interrupted run: images already written are kept.
    Raises: DataError if an archive, a member or a count is not as published (its files are removed), or a file cannot
    be written or read.
    """
    if not (missing := missing_splits(root, data_set)):
        return []
    parts = {"all": missing} if "all" in data_set.archives else {split: [split] for split in missing}
    with _locked_folder(root, data_set) as unfinished:
        paths = {}
        for key, archive in data_set.archives.items():
            if key in parts or key not in data_set.num_images:
                if archives is None:
                    download(root / "archives", archive, on_progress=on_progress)
                paths[key] = find_archive(archives or root / "archives", archive)
        for key in paths if with_md5 else {"kit"} & paths.keys():
            check_md5(paths[key], data_set.archives[key], on_progress=on_progress)
        for key, splits in parts.items():
            images = (
                (path, data) for path, data in data_set.read(data_set, paths, key) if path.split("/")[0] in splits
            )
            what, total = f"writing {' and '.join(splits)}", sum(data_set.num_images[split] for split in splits)
            with closing(write_images(unfinished, images, num_threads=num_threads)) as written:
                for done in written:
                    on_progress(what, done, total)
            for split in splits:
                _publish(root, data_set, split=split, unfinished=unfinished)
    return missing


def write_images(folder: Path, images: Iterable[StoredImage], *, num_threads: int) -> Generator[int, None, None]:
    """Write each image to its path, unless it is there already; yield the number of images done after each.

    Uses threads, since writing to a cluster's file system is mostly waiting. Raises: OSError.
    """
    in_flight: deque[tuple[Future[None], int]] = deque()
    num_bytes = num_done = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="bigbatch-write") as threads:
        for image in chain(images, (None,)):  # None: wait for all writes
            while in_flight and (image is None or len(in_flight) >= 4 * num_threads or num_bytes > MAX_IN_FLIGHT_BYTES):
                future, size = in_flight.popleft()
                future.result()
                num_bytes, num_done = num_bytes - size, num_done + 1
                yield num_done
            if image is not None:
                path, data = image
                in_flight.append((threads.submit(_write_image, folder / path, data), len(data)))
                num_bytes += len(data)


def _write_image(path: Path, data: bytes) -> None:
    with suppress(OSError):  # any problem shows when the file is written
        # the size first; then the bytes, of which a crash may have left wrong ones
        if path.stat().st_size == len(data) and read_plain(path, most=len(data)) == data:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data, mark=_PART)


@contextmanager
def _locked_folder(root: Path, data_set: DataSet) -> Iterator[Path]:
    """Lock the folder of unfinished splits, which loaders ignore, for one run at a time; yield its path.

    The folder stays after an interrupted run, unless an archive was refused.
    Raises: DataError if another run writes there, or it cannot be made or written.
    """
    unfinished = root / f".{data_set.name}.unfinished"
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        with open_lock(unfinished / "lock") as lock:
            try:
                is_alone = try_lock(lock)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                    raise
                is_alone = True  # a file system without locks, such as Lustre mounted without them
            if not is_alone:
                raise StorageError(f"{unfinished}: another run writes here; wait for its end, or name a new folder")
            try:
                yield unfinished
            except StorageError:
                raise
            except DataError:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            finally:
                if not class_names(unfinished):
                    shutil.rmtree(unfinished, ignore_errors=True)
                    with suppress(OSError):  # root holds splits
                        root.rmdir()
    except OSError as error:
        advice = "fix that and run the command again: it resumes where it stopped"
        path = error.filename2 or error.filename or unfinished
        raise DataError(f"{path}: cannot be written ({error.strerror or error}); {advice}") from error


def missing_splits(root: Path, data_set: DataSet) -> list[str]:
    """Return the splits that are still to be written.

    Raises: DataError if an existing split is not complete, or is of another data set.
    """
    missing = []
    for split in data_set.num_images:
        folder = root / split
        if not os.path.exists(folder) or not any(vars(list_split(folder)).values()):
            missing.append(split)
            continue
        source = _read_sources(root).get(split, data_set.name)
        if source != data_set.name:
            raise DataError(f"{folder}: holds {source}, not {data_set.name}; name a new folder")
        if (problem := _wrong_counts(folder, data_set, split=split)) is not None:
            raise DataError(f"{folder}: {problem}; name a new folder, or delete this one")
    return missing


def _publish(root: Path, data_set: DataSet, *, split: str, unfinished: Path) -> None:
    """Count a split's images and rename it to its final name. Raises: DataError for wrong counts; OSError."""
    if (problem := _wrong_counts(unfinished / split, data_set, split=split)) is not None:
        raise DataError(f"{unfinished / split}: {problem}; it is deleted: download the archive again and repeat")
    # before the rename: a split under its name always has its source
    sources = {**_read_sources(root), split: data_set.name}
    write_whole(root / SOURCES, as_json(sources, indent=2).encode(), mark=_PART)
    os.sync()  # so that a named split survives a power cut; syncing each of 1.3 million files would take hours
    os.replace(unfinished / split, root / split)


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the class folders in folder; none if there is no such folder."""
    return list_split(folder).folders if os.path.isdir(folder) else []


def _wrong_counts(folder: Path, data_set: DataSet, *, split: str) -> str | None:
    """Return what is wrong with the number of classes or images; None if both are as published."""
    names, num_classes, expected = class_names(folder), data_set.num_classes, data_set.num_images[split]
    found = sum(len(list_below(folder / name).images) for name in names)
    if (len(names), found) == (num_classes, expected):
        return None
    return f"holds {found:,} of {expected:,} images in {len(names):,} of {num_classes:,} classes"


def _read_sources(root: Path) -> dict[str, Any]:
    """Return the content of root's SOURCES file; empty if there is none."""
    path = root / SOURCES
    try:
        return dict(parse_json(read_plain(path)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it") from error


def _read_imagenet(data_set: DataSet, paths: Mapping[str, Path], split: str) -> Iterator[StoredImage]:
    wnids, val_wnids = read_kit(paths["kit"], data_set)
    if split == "val":
        for member in _top_images(paths["val"], data_set):
            match = _VAL_NAME.fullmatch(member.path.name)
            if match is None or not 1 <= int(match[1]) <= len(val_wnids):
                raise DataError(f"{member}: has no number from 1 to {len(val_wnids)}; {_NOT_OFFICIAL}")
            yield f"val/{val_wnids[int(match[1]) - 1]}/{member.path.name}", member.read()
        return
    for archive in data_set.members(paths["train"]):
        wnid = archive.path.stem
        if archive.path.suffix != ".tar" or len(archive.path.parts) != 1 or wnid not in wnids:
            raise DataError(f"{archive}: is not an archive of a class; {_NOT_OFFICIAL}")
        for member in _top_images(archive, data_set):
            yield f"train/{wnid}/{member.path.name}", member.read()


def _top_images(archive: Path | ArchiveMember, data_set: DataSet) -> Iterator[ArchiveMember]:
    """Yield the images of an archive without folders. Raises: DataError for anything else in it."""
    for member in data_set.members(archive):
        if len(member.path.parts) != 1 or not is_image(member.path.name):
            raise DataError(f"{member}: is not an image at the top of the archive; {_NOT_OFFICIAL}")
        yield member


def read_kit(archive: Path, data_set: DataSet) -> tuple[set[str], list[str]]:
    """Return the classes of ImageNet's development kit, and the class of each validation image, in order of its number.

    The kit numbers classes in its own order, not that of sorted names; only meta.mat states it. The caller has checked
    the archive's MD5 sum: a damaged meta.mat would crash SciPy. Raises: DataError.
    """
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise StorageError("reading ImageNet's development kit needs SciPy: pip install scipy") from error
    files = {member.path.name: member.read() for member in data_set.members(archive)}
    synsets = loadmat(io.BytesIO(files["meta.mat"]), squeeze_me=True)["synsets"]
    # the synsets with children are groups of the others
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if row["num_children"] == 0}
    truth = files["ILSVRC2012_validation_ground_truth.txt"].split()
    return set(wnids.values()), [wnids[int(number)] for number in truth]


def _read_imagenette(data_set: DataSet, paths: Mapping[str, Path], key: str) -> Iterator[StoredImage]:
    """Yield imagenette2*/<split>/<wnid>/<image> without the first folder; leaves out the table of noisy labels."""
    for member in data_set.members(paths[key]):
        if is_image(member.path.name):
            _, *inner = member.path.parts
            if len(inner) != 3 or inner[0] not in ("train", "val") or not _WNID.fullmatch(inner[1]):
                raise DataError(f"{member}: is not in train/<class> or val/<class>; {_NOT_OFFICIAL}")
            yield "/".join(inner), member.read()


def read_imagenet_v2(
    wnids: Sequence[str], data_set: DataSet, paths: Mapping[str, Path], key: str
) -> Iterator[StoredImage]:
    """Yield <archive's folder>/<class index>/<image> as val/<wnid>/<image>. Raises: DataError for another path."""
    for member in data_set.members(paths[key]):
        if is_image(member.path.name):
            index = member.path.parent.name
            if len(member.path.parts) != 3 or not index.isdecimal() or int(index) >= len(wnids):
                raise DataError(f"{member}: is not in a folder from 0 to {len(wnids) - 1}; {_NOT_OFFICIAL}")
            yield f"val/{wnids[int(index)]}/{member.path.name}", member.read()


def read_wnids(root: Path, *, num_classes: int) -> list[str]:
    """Return the class names of an ImageNet folder, by class index. Raises: DataError if it has others."""
    for folder in (root / "train", root / "val"):
        names = class_names(folder)
        if len(names) == num_classes and all(map(_WNID.fullmatch, names)):
            return names
    reason = f"has no train or val with {num_classes} class folders such as n01440764"
    raise DataError(f"{root}: {reason}; correct --classes-from")


def _read_cifar(data_set: DataSet, paths: Mapping[str, Path], key: str) -> Iterator[StoredImage]:
    """Yield all images as PNG: <split>/<class>/<position in the split, five digits>.png.

    torchvision checks the MD5 sum of each pickle before it loads it, so only published pickles are executed.
    """
    from PIL import Image
    from torchvision import datasets

    peer = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[data_set.name]
    wanted = {name for name, _ in (*peer.train_list, *peer.test_list)} | {peer.meta["filename"]}
    with tempfile.TemporaryDirectory(prefix="bigbatch-cifar-") as folder:
        for member in data_set.members(paths[key]):
            if member.path.name in wanted:
                path = Path(folder, peer.base_folder, member.path.name)
                path.parent.mkdir(exist_ok=True)
                write_new(path, member.read())
        for split in data_set.num_images:
            try:
                images = peer(folder, train=split == "train")
            except RuntimeError as error:
                reason = "its files do not have the published MD5 sums; download the archive again"
                raise DataError(f"{paths[key]}: {reason}") from error
            for position, (image_HW3, label) in enumerate(zip(images.data, images.targets, strict=True)):
                buffer = io.BytesIO()
                Image.fromarray(image_HW3).save(buffer, "PNG")
                yield f"{split}/{images.classes[label]}/{position:05d}.png", buffer.getvalue()


IMAGENET = DataSet(
    name="imagenet",
    archives={
        "train": Archive(("ILSVRC2012_img_train.tar",), 147_897_477_120, "1d675b47d978889d74fa0da5fadfb00e"),
        "val": Archive(("ILSVRC2012_img_val.tar",), 6_744_924_160, "29b22e2961454d5413ddabcf34fc5622"),
        "kit": Archive(("ILSVRC2012_devkit_t12.tar.gz",), md5="fa75699e90414af021442c21a62c3abf"),
    },
    num_classes=1000,
    num_images=IMAGENET_COUNTS,
    read=_read_imagenet,
)
"""Its archives are not downloaded here: image-net.org provides them after registration."""

_V2_NAMES = ("imagenetv2-matched-frequency.tar.gz", "imagenetv2-matched-frequency-format-val.tar.gz")
IMAGENET_V2 = DataSet(
    "imagenet-v2", {"all": Archive(_V2_NAMES)}, 1000, {"val": 10_000}, read=partial(read_imagenet_v2, ())
)
"""Its classes are numbers: positions in ImageNet's class names, which read_imagenet_v2 needs."""

_FAST_AI = "https://s3.amazonaws.com/fast-ai-imageclas"
IMAGENETTE = {
    size: DataSet(
        name,
        {"all": Archive((f"{name}.tgz",), None, md5, f"{_FAST_AI}/{name}.tgz")},
        10,
        {"train": 9469, "val": 3925},
        read=_read_imagenette,
    )
    for size, name, md5 in (
        ("full", "imagenette2", "fe2fc210e6bb7c5664d602c3cd71e612"),
        ("320px", "imagenette2-320", "3df6f0d01a2c9592104656642f5e78a3"),
        ("160px", "imagenette2-160", "e793b78cc4c9e9a4ccc0c1155377a412"),
    )
}
"""Length of the shorter side, such as 320px -> data set."""

_TORONTO = "https://www.cs.toronto.edu/~kriz"
CIFAR = {
    num_classes: DataSet(
        f"cifar{num_classes}",
        {"all": Archive((name,), None, md5, f"{_TORONTO}/{name}")},
        num_classes,
        {"train": 50_000, "val": 10_000},
        read=_read_cifar,
    )
    for num_classes, name, md5 in (
        (10, "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
        (100, "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
    )
}
