"""CIFAR, Imagenette and ImageNet-V2: one archive each, checked against torchvision and closed forms."""

import os
import pickle
import shutil
import tarfile
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from archive_writer import (
    TINY_IMAGENETTE,
    TINY_V2,
    WNIDS,
    cifar_files,
    content,
    imagenette_files,
    images_below,
    tar_of,
    v2_files,
    write_cifar,
    write_imagenette,
)
from error_texts import naming
from PIL import Image
from torchvision import datasets

from bigbatch.errors import DataError
from bigbatch.trainer.datasets import prepare as module
from bigbatch.trainer.datasets.prepare import prepare, read_imagenet_v2, read_wnids

# CIFAR


def run(root, official, data_set, **options):
    return prepare(root, data_set, archives=official, **{"on_progress": lambda *_: None, **options})


@pytest.mark.parametrize("number", [10, 100])
def test_prepare_cifar_is_what_torchvision_reads(tmp_path, number, monkeypatch):
    data_set = write_cifar(tmp_path / "official", number, monkeypatch)
    assert run(tmp_path / "root", tmp_path / "official", data_set) == ["train", "val"]
    with tarfile.open(tmp_path / "official" / data_set.archives["all"].names[0]) as tar:
        tar.extractall(tmp_path / "peer", filter="data")
    peer_class = {10: datasets.CIFAR10, 100: datasets.CIFAR100}[number]
    for split in ("train", "val"):
        peer = peer_class(tmp_path / "peer", train=split == "train")
        assert list((tmp_path / "root" / split).iterdir())
        paths = {int(path.stem): path for path in (tmp_path / "root" / split).rglob("*") if path.is_file()}
        assert sorted(paths) == list(range(len(peer)))
        for position, path in paths.items():
            with Image.open(path) as image:
                assert image.format == "PNG"
                np.testing.assert_array_equal(np.asarray(image), peer.data[position])
            assert path.parent.name == peer.classes[peer.targets[position]]
            assert path.name == f"{position:05d}.png"


class Evil:
    def __reduce__(self):
        return (os.system, ("touch executed",))


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
@pytest.mark.parametrize("data", [pickle.dumps(Evil(), protocol=2), b"<html>", None])
def test_prepare_cifar_that_is_not_as_published_is_not_loaded(tmp_path, name, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {key: value for key, value in {**cifar_files(10), name: data}.items() if value is not None}
    data_set = write_cifar(tmp_path / "official", 10, monkeypatch, files=files, published=cifar_files(10))
    with pytest.raises(DataError, match=naming("cifar-10-python.tar.gz", "MD5")) as error:
        run(tmp_path / "root", tmp_path / "official", data_set)
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"official"}


# Imagenette and ImageNet-V2


def imagenette(folder, files):
    """Writes the archive; gives what prepares it."""
    write_imagenette(folder, files)
    return partial(run, official=folder, data_set=TINY_IMAGENETTE)


def test_prepare_imagenettes_files_are_kept_as_they_are(tmp_path):
    go = imagenette(tmp_path / "official", imagenette_files())
    assert go(tmp_path / "root") == ["train", "val"]
    expected = {k.partition("/")[2]: v for k, v in imagenette_files().items() if k.count("/") == 3}
    assert images_below(tmp_path / "root") == expected
    (tmp_path / "root/val").rename(tmp_path / "elsewhere")
    seen = []
    assert go(tmp_path / "root", on_progress=lambda *s: seen.append(s)) == ["val"]
    assert images_below(tmp_path / "root") == expected
    assert seen == [("writing val", done, 3) for done in (1, 2, 3)]
    assert go(tmp_path / "root") == []
    with pytest.raises(DataError, match=naming("root/train", "imagenette2-160", "imagenette2-320")):
        go(tmp_path / "root", data_set=replace(TINY_IMAGENETTE, name="imagenette2-320"))


@pytest.mark.parametrize("path", ["imagenette2-160/train/x.JPEG", "x/test/n01440764/x.JPEG", "x/train/tench/x.JPEG"])
def test_prepare_imagenettes_images_lie_where_they_should(tmp_path, path):
    go = imagenette(tmp_path / "official", {**imagenette_files(), path: b"1"})
    with pytest.raises(DataError, match=naming(f"'{path}'", "train/<class>", "val/<class>")):
        go(tmp_path / "root")
    assert not (tmp_path / "root/train").exists()


def test_prepare_without_archives_it_is_downloaded(tmp_path, monkeypatch):
    go = imagenette(tmp_path / "server", imagenette_files())
    asked = []

    def fetch(folder, archive, *, on_progress):
        asked.append(archive)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tmp_path / "server" / archive.names[0], folder)
        on_progress(f"downloading {archive.names[0]}", 1, 1)
        with pytest.raises(DataError, match=naming("root/.imagenette2-160.unfinished", "another")):
            go(tmp_path / "root", official=None)

    monkeypatch.setattr(module, "download", fetch)
    seen = []
    assert go(tmp_path / "root", official=None, on_progress=lambda *s: seen.append(s)) == ["train", "val"]
    assert asked == list(TINY_IMAGENETTE.archives.values())
    assert seen[0] == ("downloading imagenette2-160.tgz", 1, 1)
    assert (tmp_path / "root/archives/imagenette2-160.tgz").is_file()
    assert go(tmp_path / "root", official=None) == []
    assert len(asked) == 1


def run_v2(tmp_path, files, wnids=WNIDS, **options):
    official = tmp_path / "official"
    official.mkdir(exist_ok=True)
    (official / "imagenetv2-matched-frequency.tar.gz").write_bytes(tar_of(files))  # in fact not compressed
    return run(tmp_path / "root", official, replace(TINY_V2, read=partial(read_imagenet_v2, wnids)), **options)


def test_prepare_imagenet_v2_numbers_are_positions_in_the_sorted_classes(tmp_path):
    (tmp_path / "imagenet/train").mkdir(parents=True)
    for wnid in reversed(WNIDS):
        (tmp_path / "imagenet/train" / wnid).mkdir()
    assert run_v2(tmp_path, v2_files(), read_wnids(tmp_path / "imagenet", num_classes=3)) == ["val"]
    assert images_below(tmp_path / "root") == {
        f"val/{wnid}/{n}.jpeg": content(f"{label}{n}") for label, wnid in enumerate(WNIDS) for n in range(2)
    }


@pytest.mark.parametrize("path", ["x/3/0.jpeg", "x/-1/0.jpeg", "x/one/0.jpeg", "0/0.jpeg", "x/y/0/0.jpeg"])
def test_prepare_imagenet_v2_images_lie_where_they_should(tmp_path, path):
    with pytest.raises(DataError, match=naming(f"'{path}'", "0 to 2")):
        run_v2(tmp_path, {path: b"1"})
    assert not (tmp_path / "root/val").exists()


@pytest.mark.parametrize("names", [[], WNIDS[:2], [*WNIDS[:2], "tench"]])
def test_prepare_classes_come_from_a_whole_imagenet(tmp_path, names):
    for name in names:
        (tmp_path / "val" / name).mkdir(parents=True)
    with pytest.raises(DataError, match=naming(tmp_path, "train", "val", "3 class", "--classes-from")):
        read_wnids(tmp_path, num_classes=3)
