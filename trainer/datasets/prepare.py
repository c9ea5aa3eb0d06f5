"""Official archives -> ROOT/train/<class>/<picture> and ROOT/val/<class>/<picture>."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import DataError
from bigbatch.trainer.datasets.archives import Archive, Member, check_md5, download, find_archive, read_members
from bigbatch.trainer.datasets.class_folders import (
    DataSet,
    ImageWriter,
    StoredImage,
    class_names,
    finish_split,
    go_on_or_start_anew,
    missing_splits,
    only_run,
    unfinished_folder,
)
from bigbatch.trainer.datasets.matfile import read_struct_array
from bigbatch.trainer.datasets.show_progress import Report
from bigbatch.trainer.input.image_files import is_image

IMAGENET = DataSet(
    name="imagenet",
    archives=(
        Archive(
            names=("ILSVRC2012_img_train.tar",),
            num_bytes=147_897_477_120,
            md5="1d675b47d978889d74fa0da5fadfb00e",
        ),
        Archive(
            names=("ILSVRC2012_img_val.tar",),
            num_bytes=6_744_924_160,
            md5="29b22e2961454d5413ddabcf34fc5622",
        ),
        Archive(names=("ILSVRC2012_devkit_t12.tar.gz",), md5="fa75699e90414af021442c21a62c3abf"),
    ),
    num_classes=1000,
    num_images={"train": 1_281_167, "val": 50_000},
)
"""Image-net.org hands these out after registration, so there is nothing to download here."""

IMAGENET_V2 = DataSet(
    name="imagenet-v2",
    archives=(
        Archive(
            names=("imagenetv2-matched-frequency.tar.gz", "imagenetv2-matched-frequency-format-val.tar.gz"),
        ),
    ),
    num_classes=1000,
    num_images={"val": 10_000},
)

_FAST_AI = "https://s3.amazonaws.com/fast-ai-imageclas"
IMAGENETTE = {
    size: DataSet(
        name=name,
        archives=(Archive(names=(f"{name}.tgz",), md5=md5, url=f"{_FAST_AI}/{name}.tgz"),),
        num_classes=10,
        num_images={"train": 9469, "val": 3925},
    )
    for size, name, md5 in (
        ("full", "imagenette2", "fe2fc210e6bb7c5664d602c3cd71e612"),
        ("320px", "imagenette2-320", "3df6f0d01a2c9592104656642f5e78a3"),
        ("160px", "imagenette2-160", "e793b78cc4c9e9a4ccc0c1155377a412"),
    )
}
"""By the length of the shorter side."""

WNID = re.compile(r"n\d{8}")
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
_NOT_OFFICIAL = "this is not the official archive"


@dataclass(frozen=True)
class ValLabels:
    """Holds what the development kit says."""

    wnids: frozenset[str]
    val_wnids: tuple[str, ...]
    """Class of ILSVRC2012_val_00000001.JPEG and those that follow."""


def prepare_imagenet(
    root: Path,
    *,
    archives: Path,
    data_set: DataSet,
    with_md5: bool = False,
    num_threads: int = 8,
    on_progress: Report,
) -> list[str]:
    """Write both splits of ImageNet 2012 from the archives in a folder; the splits that were not there yet.

    An interrupted run is gone on with: whole classes of the training split are not read again. The archive of a
    split that is there already is not needed.
    Raises: DataError for an archive, a member or a number that is not as published; a split that is not whole
    never stands under its name.
    """
    if not (missing := missing_splits(root, data_set)):
        return []
    by_split = dict(zip(data_set.num_images, data_set.archives, strict=False))
    needed = [*(by_split[split] for split in missing), data_set.archives[-1]]
    *images, devkit = _official_archives(archives, needed, with_md5=with_md5, on_progress=on_progress)
    labels = read_devkit(devkit, data_set=data_set)
    with only_run(root, data_set):
        for split, archive in zip(missing, images, strict=True):
            go_on_or_start_anew(root, data_set, split=split, archives=[archive, devkit])
            writer = _writer(root, data_set, splits=[split], num_threads=num_threads, on_progress=on_progress)
            {"train": _write_train, "val": _write_val}[split](archive, writer, labels=labels)
            finish_split(root, data_set, split=split)
    return missing


def _write_train(archive: Path, writer: ImageWriter, *, labels: ValLabels) -> None:
    for member in read_members(archive):
        wnid = _train_wnid(member, labels)
        writer.write_class(f"train/{wnid}", ((each.path.name, each.read()) for each in _flat(member)))


def _write_val(archive: Path, writer: ImageWriter, *, labels: ValLabels) -> None:
    writer.write((_val_path(member, labels), member.read()) for member in _flat(archive))


def prepare_from_one(
    root: Path,
    *,
    archives: Path | None,
    data_set: DataSet,
    read: Callable[[Path], Iterable[StoredImage]],
    with_md5: bool = False,
    num_threads: int = 8,
    on_progress: Report,
) -> list[str]:
    """Write a data set that comes in one archive; the splits that were not there yet.

    read lists the pictures of the archive. Without archives it is downloaded into root/archives, and stays there.
    Raises: DataError as prepare_imagenet does, or if the download fails.
    """
    if not (missing := missing_splits(root, data_set)):
        return []
    with only_run(root, data_set):
        if archives is None:
            archives = root / "archives"
            download(archives, data_set.archives[0], on_progress=on_progress)
        (archive,) = _official_archives(archives, data_set.archives, with_md5=with_md5, on_progress=on_progress)
        for split in missing:
            go_on_or_start_anew(root, data_set, split=split, archives=[archive])
        writer = _writer(root, data_set, splits=missing, num_threads=num_threads, on_progress=on_progress)
        writer.write((path, data) for path, data in read(archive) if path.split("/")[0] in missing)
        for split in missing:
            finish_split(root, data_set, split=split)
    return missing


def read_imagenette(archive: Path) -> Iterator[StoredImage]:
    """Yield imagenette2*/<split>/<wnid>/<picture> without the first folder; the noisy labels' table is left out.

    Raises: DataError for a picture elsewhere.
    """
    for member in read_members(archive):
        if not is_image(member.path.name):
            continue
        _, *inner = member.path.parts
        if len(inner) != 3 or inner[0] not in ("train", "val") or not WNID.fullmatch(inner[1]):
            raise DataError(f"{member}: lies not in train/<class> or val/<class>; {_NOT_OFFICIAL}")
        yield "/".join(inner), member.read()


def read_imagenet_v2(archive: Path, *, wnids: list[str]) -> Iterator[StoredImage]:
    """Yield <archive's folder>/<class index>/<picture> as val/<wnid>/<picture>. Raises: DataError for another path."""
    for member in read_members(archive):
        if not is_image(member.path.name):
            continue
        index = member.path.parent.name
        if len(member.path.parts) != 3 or not index.isdecimal() or int(index) >= len(wnids):
            raise DataError(f"{member}: lies not in a folder from 0 to {len(wnids) - 1}; {_NOT_OFFICIAL}")
        yield f"val/{wnids[int(index)]}/{member.path.name}", member.read()


def read_wnids(root: Path, *, num_classes: int) -> list[str]:
    """Return the class names of an ImageNet folder, by class index. Raises: DataError if it has others."""
    for folder in (root / "train", root / "val"):
        names = class_names(folder)
        if len(names) == num_classes and all(WNID.fullmatch(name) for name in names):
            return names
    raise DataError(
        f"{root}: has no train or val with {num_classes} class folders as n01440764; correct --classes-from"
    )


def read_devkit(archive: Path, *, data_set: DataSet) -> ValLabels:
    """Read the classes, and the class of each validation picture.

    The kit numbers the classes in an order of its own, which is not that of sorted wnids: only meta.mat tells.
    Raises: DataError if either file is missing or not as published.
    """
    wanted = {"meta.mat", "ILSVRC2012_validation_ground_truth.txt"}
    files = {m.path.name: m.read() for m in read_members(archive) if m.path.name in wanted}
    if lacking := sorted(wanted - files.keys()):
        raise DataError(f"{archive}: holds no {lacking[0]}; download it again")
    wnids = _class_ids(files["meta.mat"], origin=f"{archive}: meta.mat")
    try:
        val_wnids = tuple(wnids[int(line)] for line in files["ILSVRC2012_validation_ground_truth.txt"].split())
    except (ValueError, KeyError) as error:
        raise DataError(f"{archive}: the ground truth names no class with {error}; download it again") from error
    if (len(wnids), len(val_wnids)) != (data_set.num_classes, data_set.num_images["val"]):
        known = f"{len(wnids):,} classes and {len(val_wnids):,} validation pictures"
        raise DataError(f"{archive}: knows {known}; {_NOT_OFFICIAL}")
    return ValLabels(frozenset(wnids.values()), val_wnids)


def _class_ids(meta_mat: bytes, *, origin: str) -> dict[int, str]:
    """Read the kit's number -> wnid, of the synsets without children: the others are groups of these."""
    fields = ("ILSVRC2012_ID", "WNID", "num_children")
    rows = read_struct_array(meta_mat, name="synsets", fields=fields, origin=origin)
    wnids = {row["ILSVRC2012_ID"]: row["WNID"] for row in rows if row["num_children"] == 0}
    for number, wnid in wnids.items():
        if not isinstance(number, int) or not WNID.fullmatch(str(wnid)):
            raise DataError(f"{origin}: class {number!r} is called {wnid!r}; {_NOT_OFFICIAL}")
    return wnids  # type: ignore[return-value]  # just checked


def _official_archives(folder: Path, archives: Sequence[Archive], *, with_md5: bool, on_progress: Report) -> list[Path]:
    """Find all archives before any is read, since to sum up the first takes minutes."""
    paths = [find_archive(folder, archive) for archive in archives]
    if with_md5:
        for path, archive in zip(paths, archives, strict=True):
            check_md5(path, archive, on_progress=on_progress)
    return paths


def _writer(root: Path, data_set: DataSet, *, splits: list[str], num_threads: int, on_progress: Report) -> ImageWriter:
    """Return a writer that reports the pictures of these splits together."""
    num_done, total = 0, sum(data_set.num_images[split] for split in splits)
    what = f"writing {' and '.join(splits)}"

    def count(num_written: int) -> None:
        nonlocal num_done
        num_done += num_written
        on_progress(what, num_done, total)

    return ImageWriter(unfinished_folder(root, data_set), num_threads=num_threads, on_written=count)


def _flat(archive: Path | Member) -> Iterator[Member]:
    """Yield the pictures of an archive without folders. Raises: DataError for anything else in it."""
    for member in read_members(archive):
        if len(member.path.parts) != 1 or not is_image(member.path.name):
            raise DataError(f"{member}: is no picture at the top of the archive; {_NOT_OFFICIAL}")
        yield member


def _train_wnid(member: Member, labels: ValLabels) -> str:
    wnid = member.path.stem
    if member.path.suffix != ".tar" or len(member.path.parts) != 1 or wnid not in labels.wnids:
        raise DataError(f"{member}: is no archive of a class; {_NOT_OFFICIAL}")
    return wnid


def _val_path(member: Member, labels: ValLabels) -> str:
    match = _VAL_NAME.fullmatch(member.path.name)
    if match is None or not 1 <= int(match[1]) <= len(labels.val_wnids):
        raise DataError(f"{member}: has no number from 1 to {len(labels.val_wnids)}; {_NOT_OFFICIAL}")
    return f"val/{labels.val_wnids[int(match[1]) - 1]}/{member.path.name}"
