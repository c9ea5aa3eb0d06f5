"""Packing: WebDataset's layout, the same bytes however it ran, resumed where it was, verified, and every refusal."""

import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import sample_images
from benchmark_process import from_checkout
from error_texts import naming
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import functional as vision

from bigbatch.cli import main
from bigbatch.errors import ConfigError, DataError
from bigbatch.trainer.datasets import pack as pack_module
from bigbatch.trainer.datasets import processes
from bigbatch.trainer.datasets.check import check_dataset
from bigbatch.trainer.datasets.pack import PackRecipe, cut_into_shards, pack, shrink, tar_member
from bigbatch.trainer.datasets.processes import in_parallel
from bigbatch.trainer.datasets.verify_shards import verify
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.order import read_index

RECIPE = PackRecipe(shard_bytes=12_000)
CUBIC = vision.InterpolationMode.BICUBIC


def encoded(seed, width=100, height=80, *, mode="RGB", kind="JPEG", **options):
    return sample_images.encoded(sample_images.smooth_image(seed, width, height).convert(mode), kind, **options)


def decoded(data):
    return Image.open(io.BytesIO(data))


FILES = {
    **{
        f"train/{name}/{n}.JPEG": encoded(n) for name, numbers in (("a", range(5)), ("b", range(5, 9))) for n in numbers
    },
    "train/a/same.name.jpg": encoded(10),
    "train/a/same.name.png": encoded(11, kind="PNG"),
    "train/b/png-inside.JPEG": encoded(12, kind="PNG"),
    f"train/b/{'ü' * 80}.jpg": encoded(13),
    **{f"val/{name}/{n}.JPEG": encoded(n) for name, n in (("a", 20), ("b", 21))},
}


@pytest.fixture
def source(tmp_path):
    return sample_images.write(tmp_path / "source", FILES)


def contents(root, *, but=("pack.json",)):
    """pack.json knows when the images were written, all else only what they are."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name not in but}


def identities(root):
    """Changes when a file is written again, even with the same bytes."""
    return {str(p.relative_to(root)): (p.stat().st_ino, p.stat().st_mtime_ns) for p in root.rglob("*.tar")}


def test_pack_layout_is_webdatasets(source, tmp_path):
    """Its rule: the key of a member ends at the first dot of its base name; a sample is a run of one key."""
    pack(source, tmp_path / "packed", recipe=RECIPE)
    samples, members = [], []
    for path in sorted((tmp_path / "packed/train").glob("*.tar")):
        assert path.read_bytes().endswith(bytes(1024)), "an archive ends with two empty blocks"
        with tarfile.open(path) as tar:
            for member in tar:
                key, suffix = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name).groups()
                if not samples or samples[-1]["key"] != key:
                    samples.append({"key": key})
                samples[-1][suffix] = tar.extractfile(member).read()
                members.append(member)
    names = sorted(name for name in FILES if name.startswith("train"))
    assert len({sample["key"] for sample in samples}) == len(samples) == len(names)
    for sample, name in zip(samples, names, strict=True):
        kind = "png" if FILES[name][:4] == b"\x89PNG" else "jpg"
        assert sample == {"key": sample["key"], kind: FILES[name], "cls": b"0" if name < "train/b" else b"1"}
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.isreg()) for m in members} == {(0, 0, 0, "", "", True)}


def test_pack_index_is_what_tarfile_and_hashlib_find(source, tmp_path):
    pack(source, tmp_path / "packed", recipe=RECIPE)
    train = tmp_path / "packed/train"
    stated, entries_N = json.loads((train / "index.json").read_text()), np.load(train / "index.npy")
    paths = sorted(train.glob("*.tar"))
    assert [shard["name"] for shard in stated["shards"]] == [f"shard-{n:06d}.tar" for n in range(len(paths))]
    assert [shard["sha256"] for shard in stated["shards"]] == [
        hashlib.sha256(p.read_bytes()).hexdigest() for p in paths
    ]
    assert [shard["num_bytes"] for shard in stated["shards"]] == [p.stat().st_size for p in paths]
    assert stated["classes"] == ["a", "b"]
    assert stated["num_pictures"] == len(entries_N) == 13
    assert stated["made"] == {"shard_bytes": 12_000, "max_side": None, "quality": None}
    found = []
    for number, path in enumerate(paths):
        with tarfile.open(path) as tar:
            for member in tar.getmembers()[::2]:
                image = Image.open(tar.extractfile(member))
                found.append((number, member.offset_data, member.size, image.height, image.width))
    assert [entry[:5] for entry in entries_N.tolist()] == found
    assert entries_N["label"].tolist() == [0] * 7 + [1] * 6


@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=60), shard_bytes=st.integers(1, 20_000))
def test_cut_into_shards_fills_in_order_and_not_over(sizes, shard_bytes):
    shards = cut_into_shards(sizes, shard_bytes=shard_bytes)
    filled = [sum(512 + -(-sizes[n] // 512) * 512 + 1024 for n in shard) for shard in shards]
    assert [position for shard in shards for position in shard] == list(range(len(sizes)))
    assert all(len(shard) == 1 or size <= shard_bytes for shard, size in zip(shards, filled, strict=True))
    for size, following in zip(filled, shards[1:], strict=False):  # none was closed too early
        assert size + 512 + -(-sizes[following[0]] // 512) * 512 + 1024 > shard_bytes


@pytest.mark.parametrize(
    ("width", "height", "small"), [(101, 333, (50, 165)), (333, 101, (165, 50)), (80, 80, (50, 50))]
)
def test_shrink_gives_torchvisions(width, height, small):
    data = encoded(3, width, height, mode="L", quality=95)  # in colour, JPEG's halved chroma would dominate
    ours = decoded(shrink(data, path="x", max_side=50, quality=95))
    theirs = vision.resize(vision.pil_to_tensor(decoded(data)), list(small[::-1]), CUBIC, antialias=True)
    assert ours.size == small
    apart = np.abs(np.asarray(ours).astype(float) - theirs[0].numpy())
    assert apart.mean() < 1


def test_shrink_leaves_what_is_small_enough_byte_for_byte():
    for data in (encoded(0, 50, 90), encoded(0, 90, 50), encoded(0, 50, 50, kind="PNG")):
        assert shrink(data, path="x", max_side=50, quality=10) is data
        assert shrink(data, path="x", max_side=None, quality=10) is data


def test_shrink_keeps_of_exif_the_orientation_drops_alpha_and_palette_and_obeys_quality():
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    rotated = decoded(shrink(encoded(1, exif=exif.tobytes()), path="x", max_side=40, quality=90))
    assert rotated.size == (50, 40)
    assert dict(rotated.getexif()) == {0x0112: 6}  # data.exif_orientation has the same effect as before
    upright = decoded(shrink(encoded(1), path="x", max_side=40, quality=90))
    assert rotated.tobytes() == upright.tobytes()
    assert "exif" not in upright.info
    transparent = Image.open(io.BytesIO(encoded(2, mode="RGBA", kind="PNG")))
    transparent.putpixel((3, 4), (9, 9, 9, 200))
    transparent.save(buffer := io.BytesIO(), "PNG")
    assert shrink(buffer.getvalue(), path="x", max_side=40, quality=90) == buffer.getvalue()  # JPEG has no alpha
    for mode, kind in (("RGBA", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"), ("LA", "PNG")):
        assert decoded(shrink(encoded(2, mode=mode, kind=kind), path="x", max_side=40, quality=90)).mode == "RGB"
    assert len(shrink(encoded(1), path="x", max_side=60, quality=20)) < len(
        shrink(encoded(1), path="x", max_side=60, quality=95)
    )


def test_pack_shrunk_set(source, tmp_path):
    summary = pack(source, tmp_path / "packed", recipe=PackRecipe(12_000, max_side=40, quality=80))
    index = open_split(tmp_path / "packed", "train")
    assert index.sizes(np.arange(13)).tolist() == [[40, 50]] * 13
    assert {decoded(index.read(n)).size for n in range(13)} == {(50, 40)}
    assert json.loads((tmp_path / "packed/val/index.json").read_text())["made"]["quality"] == 80
    assert summary.bytes_in == sum(map(len, FILES.values()))
    assert summary.bytes_out == sum(p.stat().st_size for p in (tmp_path / "packed").rglob("*.tar"))
    assert verify(tmp_path / "packed") == 15


def test_pack_the_same_images_give_the_same_bytes(source, tmp_path):
    pack(source, tmp_path / "one", recipe=RECIPE)
    shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)  # later times
    pack(tmp_path / "copy", tmp_path / "two", recipe=RECIPE, num_workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(identities(tmp_path / "one/train")) > 3


def test_pack_a_second_call_changes_nothing(source, tmp_path):
    calls = []
    first = pack(source, tmp_path / "packed", recipe=RECIPE, on_progress=lambda *call: calls.append(call))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (first.num_images, first.num_packed) == (15, 15)
    assert first.num_shards == len(list((tmp_path / "packed").rglob("*.tar"))) == len(calls)
    before, whole = identities(tmp_path / "packed"), contents(tmp_path / "packed", but=())
    summary = pack(source, tmp_path / "packed", recipe=RECIPE)
    assert summary.num_packed == 0
    assert "complete already" in str(summary)
    assert identities(tmp_path / "packed") == before
    assert contents(tmp_path / "packed", but=()) == whole


KILLED = """
import os, signal, sys
from pathlib import Path
from bigbatch.trainer.datasets import pack as module
read = module.read_file
def read_file(path):
    if path.endswith(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return read(path)
module.read_file = read_file
module.pack(Path(sys.argv[1]), Path(sys.argv[2]), recipe=module.PackRecipe(shard_bytes=12_000))
"""


@pytest.mark.parametrize("last", ["train/a/2.JPEG", "val/b/21.JPEG"])
def test_pack_a_killed_pack_goes_on_where_it_was(source, tmp_path, last):
    target = tmp_path / "packed"
    killed = subprocess.run([sys.executable, "-c", KILLED, source, target, last], env=from_checkout())
    assert killed.returncode == -signal.SIGKILL
    assert list(target.rglob("*.unfinished")), "it was killed in the middle of a shard"
    before = identities(target)
    split = last.split("/")[0]
    with pytest.raises(DataError, match=naming(f"packed/{split}", "index.json", "`bigbatch data pack`")):
        open_split(target, split)
    assert pack(source, target, recipe=RECIPE).num_packed < (15 if before else 16)
    assert identities(target).items() >= before.items(), "a finished shard was written again"
    pack(source, tmp_path / "at-once", recipe=RECIPE)
    assert contents(target) == contents(tmp_path / "at-once")


def test_pack_images_of_any_name_are_packed_and_verified(tmp_path):
    folder = tmp_path / "images/train/c"
    folder.mkdir(parents=True)
    names = (b"a\nb.jpg", b"x\xff.jpg", "ü..y.jpg".encode(), b"n" * 150 + b".jpg", b"c\x1bd.jpg")
    for seed, name in enumerate(names):
        (folder / os.fsdecode(name)).write_bytes(encoded(seed))
    pack(tmp_path / "images", tmp_path / "packed", recipe=PackRecipe(), splits=["train"])
    assert verify(tmp_path / "packed") == 5


def pack_with_a_bad_image(source, target, *, recipe=RECIPE):
    """Leaves the source as it was, but for the time of that image."""
    (source / "train/b/8.JPEG").write_bytes(b"<html>")
    try:
        pack(source, target, recipe=recipe)
    finally:
        (source / "train/b/8.JPEG").write_bytes(FILES["train/b/8.JPEG"])


DAMAGE = {
    "gone": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5000]),
    "overwritten": lambda path: path.write_bytes(b"?" * path.stat().st_size),
    "the first again": lambda path: path.write_bytes(path.with_name("shard-000000.tar").read_bytes()),
}


@pytest.mark.parametrize(
    ("damage", "index"),
    [("gone", "whole"), ("cut", "whole"), *((kind, index) for kind in DAMAGE for index in ("gone", "broken"))],
)
def test_pack_a_damaged_shard_is_packed_again(source, tmp_path, damage, index):
    """After a kill index.json is missing, so only the shard itself shows the damage."""
    pack(source, tmp_path / "packed", recipe=RECIPE)
    train, whole = tmp_path / "packed/train", contents(tmp_path / "packed")
    before = identities(train)
    assert len(before) > 2
    if index == "broken":
        (train / "index.npy").write_bytes(b"?")
    elif index == "gone":
        (train / "index.json").unlink()
    DAMAGE[damage](train / "shard-000001.tar")
    pack(source, tmp_path / "packed", recipe=RECIPE)
    assert {name for name, identity in identities(train).items() if before[name] != identity} == {"shard-000001.tar"}
    assert contents(tmp_path / "packed") == whole


def test_pack_a_set_of_an_older_version_is_read_and_not_packed_into(source, tmp_path):
    """It listed a digest for each shard."""
    target = tmp_path / "packed"
    pack(source, target, recipe=RECIPE)
    settings = json.loads((target / "train/pack.json").read_text())
    settings["sources"] = [settings.pop("source")]
    (target / "train/pack.json").write_text(json.dumps(settings))
    assert len(open_split(target, "train")) == 13
    assert verify(target) == 15
    with pytest.raises(DataError, match=naming("packed/train", "older version", "delete")):
        pack(source, target, recipe=RECIPE)


def raise_interrupt(path):
    raise KeyboardInterrupt


def replace_bad_image(source):
    """Nothing else: the same command packs the rest."""


def insert_class(source):
    """The labels of b change, and nothing else of its shards."""
    for split in ("train", "val"):
        (source / split / "aa").mkdir()
    (source / "train/a/same.name.png").rename(source / "train/aa/same.name.png")
    (source / "val/aa/0.jpg").write_bytes(encoded(50))


def insert_image(source):
    """Small enough for the first shard: the others keep their images, but not the numbers of these."""
    (source / "train/a/00.jpg").write_bytes(encoded(51, 1, 1, mode="L"))


def remove_most(source):
    """With another class in front: nothing of before fits, and the last shards are in excess."""
    for split in ("train", "val"):
        (source / split / "a").rename(source / split / "0")
    for path in (source / "train").glob("*/*"):
        if path.name not in ("0.JPEG", "8.JPEG"):
            path.unlink()


@pytest.mark.parametrize(
    ("change", "shard_bytes", "is_killed"),
    [
        (replace_bad_image, 12_000, False),
        (insert_class, 1, False),
        (insert_image, 11_000, False),
        (remove_most, 12_000, False),
        (remove_most, 12_000, True),
    ],
)
def test_pack_a_source_that_changed_before_the_end_is_packed_as_it_is(
    source, tmp_path, monkeypatch, change, shard_bytes, is_killed
):
    target, recipe = tmp_path / "packed", PackRecipe(shard_bytes=shard_bytes)
    with pytest.raises(DataError, match=naming("train/b/8.JPEG", "image")):
        pack_with_a_bad_image(source, target, recipe=recipe)
    assert len(identities(target)) > 2
    change(source)
    if is_killed:  # between the old shards and the new pack.json
        with monkeypatch.context() as patch:
            patch.setattr(pack_module, "new_shard_file", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                pack(source, target, recipe=recipe)
    pack(source, target, recipe=recipe)
    assert verify(target) == len(list(source.rglob("*.*")))
    pack(source, tmp_path / "at-once", recipe=recipe)
    assert contents(target) == contents(tmp_path / "at-once")


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (PackRecipe(12_000, max_side=40), ("max_side None -> 40", "quality None -> 90")),
        (PackRecipe(13_000), ("shard_bytes 12000 -> 13000",)),
    ],
)
def test_pack_another_recipe_is_refused(source, tmp_path, recipe, changes):
    pack(source, tmp_path / "packed", recipe=RECIPE)
    whole = contents(tmp_path / "packed", but=())
    with pytest.raises(DataError, match=naming("packed/train", *changes, "delete")):
        pack(source, tmp_path / "packed", recipe=recipe)
    assert contents(tmp_path / "packed", but=()) == whole


@pytest.mark.parametrize("change", ["new", "gone", "grown", "same length"])
def test_pack_another_source_is_refused(source, tmp_path, change):
    pack(source, tmp_path / "packed", recipe=RECIPE)
    path = source / "train/a/2.JPEG"
    if change == "gone":
        path.unlink()
    elif change == "new":
        (source / "train/a/7.JPEG").write_bytes(encoded(30))
    elif change == "grown":
        path.write_bytes(path.read_bytes() + b"\0")
    else:
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match=naming("packed/train", "images", "delete")):
        pack(source, tmp_path / "packed", recipe=RECIPE)


def test_pack_foreign_folders_stay_untouched(source, tmp_path):
    (tmp_path / "foreign/train").mkdir(parents=True)
    (tmp_path / "foreign/train/mine.txt").write_text("keep")
    for target in (tmp_path / "foreign", source):
        before = contents(target, but=())
        with pytest.raises(DataError, match=naming(target / "train", "`bigbatch data pack`", "DST")):
            pack(source, target, recipe=RECIPE)
        assert contents(target, but=()) == before


def test_pack_settings_that_cannot_be_read_are_refused(source, tmp_path):
    (tmp_path / "packed/train").mkdir(parents=True)
    (tmp_path / "packed/train/pack.json").write_text("{")
    with pytest.raises(DataError, match=naming("packed/train/pack.json", "delete")):
        pack(source, tmp_path / "packed", recipe=RECIPE)
    (tmp_path / "packed/train/pack.json").write_text("[]")
    with pytest.raises(DataError, match=naming("packed/train", "version None -> 1", "shard_bytes None -> 12000")):
        pack(source, tmp_path / "packed", recipe=RECIPE)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=naming("file/train/pack.json", os.strerror(errno.ENOTDIR))):
        pack(source, tmp_path / "file", recipe=RECIPE)


@pytest.mark.parametrize(
    ("data", "telling", "num_workers"), [(b"<html>", "not an image", 2), (encoded(0)[:-200], "decoded", 1)]
)
def test_pack_a_bad_image_ends_packing_with_its_path(source, tmp_path, data, telling, num_workers):
    (source / "train/b/6.JPEG").write_bytes(data)
    with pytest.raises(DataError, match=naming("source/train/b/6.JPEG", telling)):
        pack(source, tmp_path / "packed", recipe=RECIPE, num_workers=num_workers)
    assert not list((tmp_path / "packed").rglob("*.unfinished"))


def test_pack_an_image_that_no_jpeg_can_hold_is_named(source, tmp_path):
    (source / "train/a/wide.png").write_bytes(encoded(0, 140_000, 4, mode="L", kind="PNG"))
    with pytest.raises(DataError, match=naming("train/a/wide.png", "70000 x 2", "JPEG", "--short-side")):
        pack(source, tmp_path / "packed", recipe=PackRecipe(max_side=2))


def test_new_shard_file_two_packs_in_one_folder_are_told_apart_from_a_full_disk(tmp_path):
    def overtaken():
        with pack_module.new_shard_file(tmp_path / "shard.tar"):
            next(tmp_path.glob(".*.unfinished")).unlink()

    with pytest.raises(DataError, match=naming("shard.tar", os.strerror(errno.ENOENT), "another")):
        overtaken()


def test_pack_an_image_that_went_away_is_named(source, tmp_path):
    (source / "train/b/dangling.jpg").symlink_to("nowhere")
    with pytest.raises(DataError, match=naming("train/b/dangling.jpg", os.strerror(errno.ENOENT))):
        pack(source, tmp_path / "packed", recipe=RECIPE)
    assert not (tmp_path / "packed").exists()


def test_pack_a_full_disk_leaves_no_half_shard_and_packing_goes_on_later(source, tmp_path, monkeypatch):
    sync, left = os.fsync, [4]  # pack.json of two splits, then two shards

    def full(descriptor):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=naming("shard-000001.tar", os.strerror(errno.ENOSPC), "room")) as caught:
        pack(source, tmp_path / "packed", recipe=RECIPE)
    assert "\n" not in str(caught.value)
    names = sorted(path.name for path in (tmp_path / "packed/train").iterdir())
    assert names == ["pack.json", "shard-000000.tar"]
    before = identities(tmp_path / "packed")
    assert pack(source, tmp_path / "packed", recipe=RECIPE).num_packed < 15
    assert identities(tmp_path / "packed").items() >= before.items()
    assert verify(tmp_path / "packed") == 15


@pytest.mark.parametrize(
    ("key", "value", "legal"),
    [("shard_bytes", 0, "1 or more"), ("max_side", 0, "1 or more"), ("quality", 101, "1 to 100")],
)
def test_pack_recipe_names_what_is_impossible(key, value, legal):
    with pytest.raises(ConfigError, match=naming(f"{key}={value} ", legal)):
        PackRecipe(**{key: value})


def test_pack_impossible_settings_are_named(source, tmp_path):
    with pytest.raises(ConfigError, match=naming("num_workers=0", "1")):
        pack(source, tmp_path / "packed", recipe=RECIPE, num_workers=0)
    for splits in ([""], ["train", "../val"], ["train", "train"]):
        with pytest.raises(ConfigError, match=naming(f"splits={','.join(splits)!r}", " train,val")):
            pack(source, tmp_path / "packed", recipe=RECIPE, splits=splits)
    shutil.rmtree(source / "val/b")
    with pytest.raises(DataError, match=naming("source/val", "lacks", ": b")):
        pack(source, tmp_path / "packed", recipe=RECIPE)
    assert not (tmp_path / "packed").exists()


def flip_byte(train):
    path = train / "shard-000001.tar"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def swap_entries(train):
    entries_N = np.load(train / "index.npy")
    entries_N[[0, 1]] = entries_N[[1, 0]]
    np.save(train / "index.npy", entries_N)


def relabel(train):
    entries_N = np.load(train / "index.npy")
    entries_N["label"][0] = 1
    np.save(train / "index.npy", entries_N)


def restated(edit):
    """Return edit with the hash of index.npy corrected: only the shard itself shows it."""

    def edit_both(train):
        edit(train)
        facts = json.loads((train / "index.json").read_text())
        facts["entries_sha256"] = hashlib.sha256((train / "index.npy").read_bytes()).hexdigest()
        (train / "index.json").write_text(json.dumps(facts))

    return edit_both


def restate(train, data):
    """Put data in place of the first shard, and make index.json agree."""
    facts = json.loads((train / "index.json").read_text())
    facts["shards"][0] |= {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (train / "shard-000000.tar").write_bytes(data)
    (train / "index.json").write_text(json.dumps(facts))


def rename_member(train):
    data = (train / "shard-000000.tar").read_bytes()
    with tarfile.open(train / "shard-000000.tar") as tar:
        member = tar.getmembers()[0]
    header, _ = tar_member("9" + member.name[1:], bytes(member.size))
    restate(train, header + data[len(header) :])


def add_member(train):
    data = (train / "shard-000000.tar").read_bytes()
    restate(
        train,
        data[:-1024]
        + b"".join(tar_member("00000099-x.jpg", encoded(0)) + tar_member("00000099-x.cls", b"0"))
        + bytes(1024),
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_byte, r"shard-000001.tar: its bytes are not those that were packed; delete it and run"),
        (
            restated(swap_entries),
            r"shard-000000.tar: image 0: the shard holds \(.*index.npy states .*; delete the shard",
        ),
        (restated(relabel), r"shard-000000.tar: image 0: the shard holds .*, 0\) as .*states .*, 1\)"),
        (rename_member, r"image 90000000: the shard holds .*, index.npy states \(0, "),
        (add_member, r"shard-000000.tar: the shard holds \d images, index.npy states \d;"),
        (lambda train: restate(train, b"?" * 20_000), r"shard-000000.tar: cannot be read .*; delete it and run"),
        (lambda train: (train / "index.json").unlink(), r"train: packing has not finished"),
    ],
)
def test_verify_messages_of_damage(source, tmp_path, capsys, damage, message):
    """The room's catalogue of messages: the one test here that holds whole sentences."""
    pack(source, tmp_path / "packed", recipe=RECIPE)
    calls = []
    assert verify(tmp_path / "packed", on_progress=lambda *call: calls.append(call)) == 15
    num_shards = len(identities(tmp_path / "packed/train")) + len(identities(tmp_path / "packed/val"))
    assert calls == [(n, num_shards) for n in range(1, num_shards + 1)]
    damage(tmp_path / "packed/train")
    assert main(["data", "pack", "--verify", str(tmp_path / "packed"), "--workers", "1"]) == 1
    *progress, line = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert all(re.fullmatch(r"verifying .*: \d+ of \d+ shards", line) for line in progress)


def test_verify_wants_shards(tmp_path):
    with pytest.raises(DataError, match=naming(tmp_path, "DST", "`bigbatch data pack`")):
        verify(tmp_path)


def test_pack_takes_nested_images_and_counts_what_it_leaves_out(source, tmp_path):
    (source / "train/a").rename(source / "train/b/in")
    (source / "train/a").mkdir()
    (source / "train/b/in/0.JPEG").rename(source / "train/a/0.JPEG")
    (source / "val/x.gif").touch()
    said: list[object] = []
    told = {"on_left_out": said.append, "on_progress": lambda *at: said.append(at)}
    assert pack(source, tmp_path / "packed", recipe=PackRecipe(), **told).num_images == 15
    assert str(said[0]).startswith("1 file is left out: 1 in no class folder"), "before all images are packed"
    packed, index = open_split(tmp_path / "packed", "train"), read_index(source, "train")
    assert [packed.read(i) for i in range(len(packed))] == [index.read(i) for i in range(len(index))]
    (tmp_path / "packed/train/more").mkdir()
    (tmp_path / "packed/train/more/x.jpg").write_bytes(encoded(0))
    kinds = {finding.kind for finding in check_dataset(tmp_path / "packed").problems}
    assert "image left out, in no shard" in kinds


def test_pack_the_command(source, tmp_path, capsys):
    target = str(tmp_path / "packed")
    argv = ["data", "pack", str(source), target, "--short-side", "40", "--workers", "1"]
    assert main(argv) == 0
    printed = capsys.readouterr().out.replace("\n", "")
    expected = r"packed: 15 images in 2 shards, [\d.]+ MB in, [\d.]+ MB out, [\d.]+ s, \d+ images/s"
    assert re.search(expected, printed)
    assert main(["data", "pack", "--verify", target, "--workers", "1"]) == 0
    assert "all 15 images are as they were packed" in capsys.readouterr().out.replace("\n", "")
    assert main([*argv, "--short-side", "41", "--quality", "50"]) == 1
    assert "max_side 40 -> 41, quality 90 -> 50" in capsys.readouterr().err
    assert main([*argv[:3], str(tmp_path / "val-only"), "--splits", "val", "--workers", "1"]) == 0
    assert [path.name for path in (tmp_path / "val-only").iterdir()] == ["val"]


@pytest.mark.parametrize("argv", [[], ["source"], ["source", "target", "--verify", "target"]])
def test_pack_a_wrong_command_line_is_explained(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["data", "pack", *argv])
    *_, line = capsys.readouterr().err.splitlines()
    assert re.search(naming("SRC", "DST", "--verify"), line)


def test_in_parallel_an_impossible_number_of_processes_is_refused_at_the_call(source, tmp_path, capsys):
    for number in (0, 4097):
        with pytest.raises(ConfigError, match=naming(f"num_workers={number}", "1 to 4096")):
            in_parallel(len, [], num_workers=number)
    pack(source, tmp_path / "packed", recipe=RECIPE)
    for words in (["check", str(source)], ["pack", "--verify", str(tmp_path / "packed")]):
        assert main(["data", *words, "--workers", "0"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "num_workers=0" in line


def test_in_parallel_an_interrupt_while_tasks_are_handed_over_cancels_them(tmp_path, monkeypatch):
    class Interrupted(processes.ProcessPoolExecutor):
        num_submitted = 0

        def submit(self, *args):
            self.num_submitted += 1
            if self.num_submitted > 300:
                raise KeyboardInterrupt
            return super().submit(*args)

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(in_parallel(Path.touch, [tmp_path / str(n) for n in range(400)], num_workers=2))
    assert len(list(tmp_path.iterdir())) < 100


def test_in_parallel_a_process_that_dies_is_reported():
    with pytest.raises(DataError, match=naming("died", "--workers", "if __name__ == '__main__'")):
        list(in_parallel(os._exit, [1, 1], num_workers=2))


ORPHANS = """
import os, sys, time
from pathlib import Path
from bigbatch.trainer.datasets.processes import in_parallel
def work(number):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)
if __name__ == "__main__":
    list(in_parallel(work, [1, 2], num_workers=2))
"""


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_in_parallel_workers_end_with_a_parent_that_was_killed(tmp_path):
    (tmp_path / "script.py").write_text(ORPHANS)
    (tmp_path / "pids").mkdir()
    parent = subprocess.Popen([sys.executable, tmp_path / "script.py", tmp_path / "pids"], env=from_checkout())
    deadline = time.monotonic() + 200
    while len(list((tmp_path / "pids").iterdir())) < 2:
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    workers = [path.name for path in (tmp_path / "pids").iterdir()]
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
