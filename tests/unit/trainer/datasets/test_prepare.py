"""`bigbatch data prepare`: archives of the official structure become folders, whole or not at all."""

import csv
import errno
import fcntl
import hashlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from archive_writer import (
    HOSTILE,
    KIT,
    NUM_TRAIN,
    TINY,
    TRAIN,
    VAL,
    WHOLE,
    WNIDS,
    class_tars,
    content,
    devkit,
    images_below,
    tar_of,
    val_files,
    write_official,
)
from error_texts import naming
from sample_images import REAL_DATA

from bigbatch import files
from bigbatch.errors import DataError
from bigbatch.trainer.datasets import prepare as module
from bigbatch.trainer.datasets.archives import Archive
from bigbatch.trainer.datasets.prepare import IMAGENET, prepare, read_kit
from bigbatch.trainer.input.order import read_index

EXPECTED = {
    **{
        f"train/{wnid}/{wnid}_{7 * n + 1}.JPEG": content(f"{wnid}_{7 * n + 1}.JPEG")
        for wnid, count in NUM_TRAIN.items()
        for n in range(count)
    },
    "val/n01440764/ILSVRC2012_val_00000001.JPEG": content("ILSVRC2012_val_00000001.JPEG"),
    "val/n03000684/ILSVRC2012_val_00000002.JPEG": content("ILSVRC2012_val_00000002.JPEG"),
    "val/n02102040/ILSVRC2012_val_00000003.JPEG": content("ILSVRC2012_val_00000003.JPEG"),
    "val/n02102040/ILSVRC2012_val_00000004.JPEG": content("ILSVRC2012_val_00000004.JPEG"),
    "val/n01440764/ILSVRC2012_val_00000005.JPEG": content("ILSVRC2012_val_00000005.JPEG"),
}


@pytest.fixture
def official(tmp_path):
    """A folder with the three archives, three classes small."""
    folder = tmp_path / "official"
    write_official(folder)
    return folder


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """What other programs have yet to write is not waited for, hundreds of times."""
    monkeypatch.setattr(os, "sync", lambda: None)


def run(root, official, *, on_progress=lambda *_: None, data_set=TINY, **options):
    return prepare(root, data_set, archives=official, on_progress=on_progress, **options)


def assert_heals(root, official):
    """With complete archives the next run makes exactly the data set, whatever the last run left."""
    write_official(official)
    run(root, official)
    assert images_below(root) == EXPECTED
    assert {path.name for path in root.iterdir()} == {"train", "val", module.SOURCES}


@pytest.mark.parametrize("num_threads", [1, 8])
def test_prepare_imagenet_lies_as_a_run_reads_it(tmp_path, official, num_threads):
    seen = []
    root = tmp_path / "new/folder"
    assert run(root, official, num_threads=num_threads, on_progress=lambda *s: seen.append(s)) == ["train", "val"]
    assert images_below(root) == EXPECTED
    assert seen == [
        *(("writing train", done, 9) for done in range(1, 10)),
        *(("writing val", done, 5) for done in range(1, 6)),
    ]
    assert read_index(root, "train").classes == tuple(WNIDS)
    labels_by_number = [0, 2, 1, 1, 0]  # the ground truth as positions in the sorted names
    val = read_index(root, "val", classes=WNIDS)
    assert {p.split("_")[-1][:8]: n for p, n in zip(val.paths, val.labels_N, strict=True)} == {
        f"{number:08d}": label for number, label in enumerate(labels_by_number, 1)
    }


def test_prepare_what_is_complete_stays_untouched_and_needs_no_archives(tmp_path, official):
    run(tmp_path / "root", official)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")}
    assert run(tmp_path / "root", tmp_path / "nowhere") == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")} == before


@pytest.mark.parametrize("stop_at", [1, 6, 9, 10, 14])
def test_prepare_an_interrupted_run_is_gone_on_with(tmp_path, official, stop_at):
    root, calls = tmp_path / "root", []

    def interrupt(*state):
        calls.append(state)
        if len(calls) == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(root, official, on_progress=interrupt, num_threads=1)
    assert (root / "train").exists() == (stop_at > 9)
    assert not (root / "val").exists()
    done = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in root.rglob("*.JPEG")}
    assert len(done) >= stop_at
    assert run(root, official) == ["train", "val"][stop_at > 9 :]
    assert images_below(root) == EXPECTED
    now = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in root.rglob("*.JPEG")}
    assert all(now[path.name] == state for path, state in done.items()), "an image was written twice"


def test_prepare_a_name_is_given_after_everything_reached_the_disk(tmp_path, official, monkeypatch):
    done, replace_file = [], os.replace

    def rename(old, new):
        done.append(Path(new).name)
        replace_file(old, new)

    monkeypatch.setattr(module.os, "sync", lambda: done.append("sync"))
    monkeypatch.setattr(module.os, "replace", rename)
    run(tmp_path / "root", official)
    assert [done[position - 1 : position + 1] for position, name in enumerate(done) if name in ("train", "val")] == [
        ["sync", "train"],
        ["sync", "val"],
    ]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_prepare_a_file_system_without_locks_will_do(tmp_path, official, monkeypatch, number):
    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if number == errno.EIO:
        with pytest.raises(DataError, match=naming("root/.imagenet.unfinished", os.strerror(number))):
            run(tmp_path / "root", official)
        return
    assert_heals(tmp_path / "root", official)


@pytest.mark.parametrize(("missing", "needed", "done"), [("val", VAL, TRAIN), ("train", TRAIN, VAL)])
def test_prepare_only_the_archives_of_missing_splits_are_needed(tmp_path, official, missing, needed, done):
    sums = [hashlib.md5((official / name).read_bytes()).hexdigest() for name in WHOLE]
    checked = replace(TINY, archives=published(sums))
    root, seen = tmp_path / "root", []
    run(root, official)
    shutil.rmtree(root / missing)
    (root / missing).mkdir()  # empty is as good as missing
    inode = (root / ("train" if missing == "val" else "val")).stat().st_ino
    (official / done).unlink()
    found = run(root, official, data_set=checked, with_md5=True, on_progress=lambda *s: seen.append(s[0]))
    assert found == [missing]
    assert list(dict.fromkeys(seen)) == [f"checking {needed}", f"checking {KIT}", f"writing {missing}"]
    assert images_below(root) == EXPECTED
    assert (root / ("train" if missing == "val" else "val")).stat().st_ino == inode


def published(sums, sizes=(None, None, None)):
    facts = zip(TINY.archives, WHOLE, sizes, sums, strict=True)
    return {key: Archive((name,), size, md5) for key, name, size, md5 in facts}


def test_prepare_the_kit_is_read_after_its_md5_sum_was_compared(tmp_path, official, monkeypatch):
    """scipy's loadmat dies of damaged files."""
    sums = [None, None, "0" * 32]
    monkeypatch.setattr(module, "read_kit", lambda *_: pytest.fail("is read"))
    with pytest.raises(DataError, match=naming(KIT, "0" * 32)):
        run(tmp_path / "root", official, data_set=replace(TINY, archives=published(sums)))


def test_prepare_what_a_killed_run_left_is_replaced(tmp_path, official):
    root = tmp_path / "root"
    left = root / ".imagenet.unfinished/train/n01440764"
    left.mkdir(parents=True)
    (left / ".n01440764_1.JPEG.part").write_bytes(b"half")
    (left / "n01440764_8.JPEG").write_bytes(b"of an older file system, too short")
    (left / "n01440764_15.JPEG").write_bytes(bytes(len(content("n01440764_15.JPEG"))))  # the machine crashed
    (root / ".imagenet.unfinished/val/n03000684").mkdir(parents=True)
    (root / ".imagenet.unfinished/val/n03000684/.ILSVRC2012_val_00000002.JPEG.part").write_bytes(b"")
    run(root, official)
    assert images_below(root) == EXPECTED


def test_prepare_what_no_archive_holds_is_refused_and_deleted(tmp_path, official):
    root = tmp_path / "root"
    left = root / ".imagenet.unfinished/val/n03000684/of_another_archive.JPEG"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"1")
    with pytest.raises(DataError, match=naming("unfinished/val", "6 of 5")):
        run(root, official)
    assert not left.exists()
    assert_heals(root, official)


@pytest.mark.parametrize("fails_at", [1, 7, 10, 16])
def test_prepare_a_full_disk_is_one_line_and_the_next_run_goes_on(tmp_path, official, monkeypatch, fails_at):
    root, calls = tmp_path / "root", []

    def full(path, mode, **how):
        if how:  # to read
            return open(path, mode, **how)
        assert path.suffix == ".part"
        calls.append(path)
        if len(calls) < fails_at:
            return open(path, mode)
        path.write_bytes(b"half")
        return open("/dev/full", "wb")

    monkeypatch.setattr(files, "open", full, raising=False)
    with pytest.raises(DataError, match=naming(f"{root}/", os.strerror(errno.ENOSPC), "again")) as error:
        run(root, official)
    assert "\n" not in str(error.value)
    assert not list(root.rglob("*.part"))
    assert {path.name for path in root.iterdir()} <= {".imagenet.unfinished", module.SOURCES, "train"}
    monkeypatch.undo()
    assert_heals(root, official)


def test_prepare_a_name_that_cannot_be_given_is_named(tmp_path, official, monkeypatch):
    def refuse(old, new):
        if Path(new) == tmp_path / "root/train":
            raise PermissionError(errno.EACCES, "Permission denied", str(old), None, str(new))
        os.rename(old, new)

    monkeypatch.setattr(module.os, "replace", refuse)
    with pytest.raises(DataError, match=naming("root/train", "written", os.strerror(errno.EACCES))):
        run(tmp_path / "root", official)
    monkeypatch.undo()
    assert_heals(tmp_path / "root", official)


def damaged_class():
    """tarfile alone takes the second header for the end of the archive."""
    tars = class_tars()
    data = bytearray(tars["n01440764.tar"])
    data[3 * 512 + 150] ^= 255
    return tar_of({**tars, "n01440764.tar": bytes(data)})


def without(files, name):
    return {key: data for key, data in files.items() if key != name}


WRONG = {
    "damaged class": (TRAIN, damaged_class, ("'n01440764.tar'", "damaged")),
    "class missing": (
        TRAIN,
        lambda: tar_of(without(class_tars(), "n02102040.tar")),
        ("unfinished/train", "8 of 9", "2 of 3"),
    ),
    "empty class": (
        TRAIN,
        lambda: tar_of({**class_tars(), "n02102040.tar": tar_of({})}),
        ("unfinished/train", "8 of 9", "2 of 3"),
    ),
    "unknown class": (TRAIN, lambda: tar_of({"n99999999.tar": tar_of({})}), ("'n99999999.tar'", "class")),
    "no class": (TRAIN, lambda: tar_of({"readme.txt": b"hello"}), ("'readme.txt'", "class")),
    "class in a folder": (TRAIN, lambda: tar_of({"a/n01440764.tar": b""}), ("'a/n01440764.tar'", "class")),
    "image in a folder": (TRAIN, lambda: tar_of({"n01440764.tar": tar_of({"a/b.JPEG": b"1"})}), ("'a/b.JPEG'", "top")),
    "no image": (TRAIN, lambda: tar_of({"n01440764.tar": tar_of({"b.txt": b"1"})}), ("'b.txt'", "top")),
    "hidden file": (TRAIN, lambda: tar_of({"n01440764.tar": tar_of({".b.JPEG": b"1"})}), ("'.b.JPEG'", "top")),
    "val missing": (
        VAL,
        lambda: tar_of(without(val_files(), "ILSVRC2012_val_00000005.JPEG")),
        ("unfinished/val", "4 of 5"),
    ),
    "val number": (
        VAL,
        lambda: tar_of({"ILSVRC2012_val_00000006.JPEG": b"1"}),
        ("'ILSVRC2012_val_00000006.JPEG'", "1 to 5"),
    ),
    "val number 0": (
        VAL,
        lambda: tar_of({"ILSVRC2012_val_00000000.JPEG": b"1"}),
        ("'ILSVRC2012_val_00000000.JPEG'", "1 to 5"),
    ),
    "val name": (VAL, lambda: tar_of({"image.JPEG": b"1"}), ("'image.JPEG'", "1 to 5")),
}


@pytest.mark.parametrize("case", WRONG)
def test_prepare_what_is_not_as_published_makes_no_split(tmp_path, official, case):
    name, make, parts = WRONG[case]
    (official / name).write_bytes(make())
    root = tmp_path / "root"
    with pytest.raises(DataError, match=naming(*parts)) as error:
        run(root, official)
    assert "\n" not in str(error.value)
    assert not (root / ("val" if name == VAL else "train")).exists()
    assert_heals(root, official)


@pytest.mark.parametrize("place", ["train", "class", "val", "devkit"])
def test_prepare_hostile_archives_write_nothing_outside(tmp_path, official, place):
    """One kind in each place; test_read_members_hostile_members_are_refused_in_one_line has all kinds."""
    files, parts = HOSTILE["parent"]
    hostile = {
        "train": lambda: (TRAIN, tar_of(files)),
        "class": lambda: (TRAIN, tar_of({"n01440764.tar": tar_of(files)})),
        "val": lambda: (VAL, tar_of(files)),
        "devkit": lambda: (KIT, tar_of(files, mode="w:gz")),
    }
    name, data = hostile[place]()
    (official / name).write_bytes(data)
    with pytest.raises(DataError, match=naming(name, *parts)):
        run(tmp_path / "root", official)
    assert not (tmp_path / "root/val").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"official", "root"}
    assert {path.name for path in official.iterdir()} == {TRAIN, VAL, KIT}


def test_prepare_a_split_of_something_else_is_left_alone(tmp_path, official):
    root = tmp_path / "root"
    run(root, official)
    (root / "train/n01440764/n01440764_1.JPEG").unlink()
    with pytest.raises(DataError, match=naming("root/train", "8 of 9", "3 of 3")):
        run(root, official)
    with pytest.raises(DataError, match=naming("root/train", "imagenet,", "imagenet-2")):
        run(root, official, data_set=replace(TINY, name="imagenet-2"))
    (root / module.SOURCES).write_text("{")
    with pytest.raises(DataError, match=naming("root/prepared.json", "delete")):
        run(root, official)


def test_prepare_a_file_in_the_way_is_named(tmp_path, official):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/train").write_bytes(b"")
    with pytest.raises(DataError, match=naming("root/train", "listed", os.strerror(errno.ENOTDIR))):
        run(tmp_path / "root", official)
    with pytest.raises(DataError, match=naming("root/train/deeper", "written", os.strerror(errno.ENOTDIR))):
        run(tmp_path / "root/train/deeper", official)
    assert module.class_names(tmp_path / "root/train") == []


def test_prepare_archives_are_checked_before_any_is_read(tmp_path, official):
    sums = [hashlib.md5((official / name).read_bytes()).hexdigest() for name in WHOLE]
    sizes = [(official / name).stat().st_size for name in WHOLE]
    checked = replace(TINY, archives=published(sums, sizes))
    (official / VAL).write_bytes((official / VAL).read_bytes()[:-1] + b"x")
    found = hashlib.md5((official / VAL).read_bytes()).hexdigest()
    with pytest.raises(DataError, match=naming(VAL, found, sums[1], "download")):
        run(tmp_path / "root", official, data_set=checked, with_md5=True)
    (official / VAL).write_bytes(b"short")
    with pytest.raises(DataError, match=naming(VAL, f"5 of {sizes[1]:,} bytes")):
        run(tmp_path / "root", official, data_set=checked)
    (official / VAL).unlink()
    with pytest.raises(DataError, match=naming(official, VAL, "--archives")):
        run(tmp_path / "root", official, data_set=checked)
    assert not (tmp_path / "root").exists()
    (official / VAL).write_bytes(WHOLE[VAL]())
    seen = []
    run(tmp_path / "root", official, data_set=checked, with_md5=True, on_progress=lambda *s: seen.append(s))
    assert seen[:3] == [(f"checking {name}", size, size) for name, size in zip(WHOLE, sizes, strict=True)]


@pytest.mark.parametrize("case", ["missing", "short", "not downloaded", "no SciPy"])
def test_prepare_keeps_what_is_unpacked_if_an_archive_cannot_be_had(tmp_path, official, monkeypatch, case):
    left = tmp_path / "root/.imagenet.unfinished/train/n01440764/n01440764_1.JPEG"
    left.parent.mkdir(parents=True)
    left.write_bytes(content(left.name))
    archives, data_set = official, TINY
    if case == "missing":
        archives = tmp_path / "mistyped"
    elif case == "short":
        data_set = replace(TINY, archives=published([None] * 3, [10**6] * 3))
    elif case == "not downloaded":
        archives, data_set = None, replace(TINY, archives={"train": Archive((TRAIN,), url="file:///nowhere")})
    else:
        monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(DataError):
        run(tmp_path / "root", archives, data_set=data_set)
    assert left.exists()


def test_prepare_the_real_kit_numbers_lead_to_the_real_labels(tmp_path):
    meta = REAL_DATA.parent / "imagenet-meta"
    if not meta.is_dir():
        pytest.skip("the real class list is not here; name the folder beside it in BIGBATCH_REAL_DATA")
    with open(meta / "classes.csv", newline="") as classes, open(meta / "val_map.csv", newline="") as val:
        ids = {row["wnid"]: int(row["ilsvrc2012_id"]) for row in csv.DictReader(classes)}
        expected = [row["wnid"] for row in csv.DictReader(val)]
    (tmp_path / KIT).write_bytes(devkit(ids=ids, truth=[ids[wnid] for wnid in expected]))
    wnids, val_wnids = read_kit(tmp_path / KIT, IMAGENET)
    assert val_wnids == expected
    assert sorted(wnids) == (meta / "wnids.txt").read_text().split()
