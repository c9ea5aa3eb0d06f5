"""WebDataset's tars are read as they are published; the oracles are tarfile, which writes them, and the folder."""

import gzip
import io
import json
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from error_texts import naming
from image_loaders import open_shards
from sample_images import encoded, smooth_image, write

from bigbatch.cli import main
from bigbatch.errors import DataError
from bigbatch.tools.init.layout import find_layout
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.datasets.stage import stage
from bigbatch.trainer.input import webdataset
from bigbatch.trainer.input.data_root import DataRoot, open_split
from bigbatch.trainer.input.order import read_index

IMAGES = [encoded(smooth_image(seed, 90, 70), ("JPEG", "PNG", "WEBP")[seed % 3]) for seed in range(12)]
SUFFIXES = ("jpg", "png", "webp")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(webdataset, "measured_folder", lambda name: tmp_path / "cache" / name)


def tar(path, members, *, form=tarfile.PAX_FORMAT):
    """Write a tar of (name or TarInfo, content)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as out:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1.5  # as WebDataset's writer does: such a time needs a header of its own
            out.addfile(info, io.BytesIO(data))
    return path


def sample(number, label=None, *, key="n01440764_{}"):
    """An image, its class and its facts, as the hub's shards have them."""
    label = number % 2 if label is None else label
    name = key.format(number)
    facts = {"label": label, "width": 90, "height": 70}
    yield f"{name}.{SUFFIXES[number % 3]}", IMAGES[number]
    yield f"{name}.cls", str(label).encode()
    yield f"{name}.json", json.dumps(facts).encode()


def hub(root, **options):
    """Two shards of training images, and one to validate with."""
    for name, numbers in {"train-0000": (0, 1, 2, 3), "train-0001": (4, 5, 6, 7), "validation-00": (8, 9)}.items():
        tar(root / f"imagenet1k-{name}.tar", [each for n in numbers for each in sample(n)], **options)
    return root


def held(split):
    return [split.read(position) for position in range(len(split))]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_webdataset_hub_layout(tmp_path, form):
    root = hub(tmp_path / "hub", form=form)
    train, val = (open_split(root, split) for split in ("train", "val"))
    assert (held(train), held(val)) == (IMAGES[:8], IMAGES[8:10])
    assert train.labels_N.tolist() == [0, 1] * 4
    assert (train.labels_N.dtype, train.classes, val.classes) == (np.int64, ("0", "1"), ("0", "1"))
    assert train.name(5) == f"{root}/imagenet1k-train-0001.tar: n01440764_5.webp"
    assert val.name(0) == f"{root}/imagenet1k-validation-00.tar: n01440764_8.webp"
    assert DataRoot(root).classes("val") == ("0", "1")
    travelled = pickle.loads(pickle.dumps(train))
    assert held(travelled) == held(train)
    assert len(open_shards(root)) == 3
    for each in (train, val, travelled):
        each.close()
    assert not open_shards(root)


def test_webdataset_images_of_packed_shards_are_those_of_the_folder(tmp_path):
    """What `data pack` writes are such shards, too: without its index they give the same images in the same order."""
    files = {f"{split}/{'ab'[n % 2]}/{n}.{SUFFIXES[n % 3]}": IMAGES[n] for n in range(12) for split in ("train", "val")}
    folder = write(tmp_path / "folder", files)
    pack(folder, tmp_path / "shards", recipe=PackRecipe(shard_bytes=20_000))
    for split in ("train", "val"):
        for name in ("index.json", "index.npy", "pack.json"):
            (tmp_path / "shards" / split / name).unlink()
    (tmp_path / "shards/classnames.txt").write_text("a\nb\n")
    ours, theirs = open_split(tmp_path / "shards", "train"), read_index(folder, "train")
    assert len({ours.name(n).partition(":")[0] for n in range(12)}) > 2
    assert (ours.classes, ours.labels_N.tolist()) == (theirs.classes, theirs.labels_N.tolist())
    assert held(ours) == held(theirs)


@pytest.mark.parametrize(
    ("labels", "suffix", "classes"),
    [
        (["cat", "dog", "cat"], "cls", ("cat", "dog")),
        ([" 3\n", "0", "01"], "cls", ("0", "1", "2", "3")),
        (['{"label": 2}', '{"cls": 0, "x": []}', "1"], "json", ("0", "1", "2")),
        (['{"class": "cat"}', '"dog"', '{"label": "Bär"}'], "json", ("Bär", "cat", "dog")),
        (["7", "A", "a", "Q", "7", "0"], "cls", ("0", "7", "A", "Q", "a")),
    ],
)
def test_webdataset_classes(tmp_path, labels, suffix, classes, capsys):
    members = [
        each
        for n, label in enumerate(labels)
        for each in ((f"x/{n}.JPG", IMAGES[n]), (f"x/{n}.{suffix.upper()}", label.encode()))
    ]
    tar(tmp_path / "s/train/0.tar", members)
    found = open_split(tmp_path / "s", "train")
    assert found.classes == classes
    stated = [json.loads(label) if suffix == "json" else label.strip() for label in labels]
    stated = [next(iter(label.values())) if isinstance(label, dict) else label for label in stated]
    assert [found.classes[label] for label in found.labels_N] == [str(s).lstrip("0") or "0" for s in stated]
    assert (": numbers and names; all are read as names" in capsys.readouterr().err) == ("A" in labels)


def test_webdataset_what_the_convention_passes_over(tmp_path):
    folder, odd = tarfile.TarInfo("x"), "ü" * 120  # a name that no plain header takes
    folder.type = tarfile.DIRTYPE
    members = [
        (folder, b""),
        ("__info__.json", b"{}"),
        ("._a.jpg", b"macOS"),
        ("a.jpg", IMAGES[0]),
        ("._a.cls", b"macOS"),
        ("a.seg.png", IMAGES[1]),
        ("a.cls", b"cat"),
        ("README", b"text"),
        ("b.bmp", b"BM"),
        ("b.cls", b"cat"),
        ("c.txt", b"only text"),
        (f"x/{odd}.jpg", IMAGES[3]),
        (f"x/{odd}.cls", b"dog"),
    ]
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = tar(tmp_path / f"{form}/train/0.tar", members, form=form)
        (path.parent / "._0.tar").write_bytes(b"macOS")
        found = open_split(path.parents[1], "train")
        assert held(found) == [IMAGES[0], IMAGES[3]]
        assert found.name(1) == f"{path}: x/{odd}.jpg"
        assert found.left_out == {".bmp": 1, "sample without an image": 1}


def test_webdataset_sizes_in_base_256_are_read_as_tarfile_reads_them(tmp_path):
    """GNU tar writes sizes from 8 GiB on so, and some writers all of them."""
    path = tar(tmp_path / "s/train/0.tar", list(sample(0))[:2], form=tarfile.USTAR_FORMAT)
    data = bytearray(path.read_bytes())
    for start, size in ((0, len(IMAGES[0])), (512 - (-len(IMAGES[0]) // 512) * 512, 1)):
        data[start + 124 : start + 136] = b"\x80" + size.to_bytes(11, "big")
        data[start + 148 : start + 156] = b" " * 8
        data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    path.write_bytes(data)
    with tarfile.open(path) as oracle:
        assert [member.size for member in oracle] == [len(IMAGES[0]), 1]
    assert held(open_split(tmp_path / "s", "train")) == IMAGES[:1]


def test_webdataset_shards_may_number_their_samples_alike(tmp_path):
    for shard in (0, 1):
        tar(tmp_path / f"s/train/{shard}.tar", sample(shard, key="000"))
    assert held(open_split(tmp_path / "s", "train")) == IMAGES[:2]


def special(name, kind, **facts):
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in facts.items():
        setattr(info, key, value)
    return [(info, b"")]


def with_claim(name, num_bytes):
    """A member that claims more than is there, and than may be."""

    def edit(path):
        tar(path, sample(0))
        info = tarfile.TarInfo(name)
        info.size = num_bytes
        path.write_bytes(path.read_bytes()[:-10240] + info.tobuf())
        os.truncate(path, num_bytes + 100_000)  # a sparse file: nothing is written

    return edit


def cut(num_bytes):
    return lambda path: path.write_bytes(tar(path, sample(0)).read_bytes()[:num_bytes])


def flipped(path):
    data = bytearray(tar(path, sample(0)).read_bytes())
    data[600] ^= 1 if data[512 + 156 : 512 + 157] == b"x" else 0
    data[0] ^= 1
    path.write_bytes(data)


A, CLS = ("a.jpg", IMAGES[0]), ("a.cls", b"0")


def zeroed(path):
    """A block of zeros in place of the second header, which stands at the same place whatever the image's size."""
    data = bytearray(tar(path, [("a.txt", b"x" * 1500), *sample(0)]).read_bytes())
    first = 2 * 512 + 512 + 1536  # a header for the time, its content, the member's own header, its content
    data[first : first + 512] = bytes(512)
    path.write_bytes(data)


DAMAGE = {
    "symbolic link": ([A, CLS, *special("b.jpg", tarfile.SYMTYPE, linkname="/etc/x")], "b.jpg' is a symbolic link"),
    "hard link": ([A, CLS, *special("b.jpg", tarfile.LNKTYPE, linkname="a.jpg")], "b.jpg' is a hard link"),
    "long link": ([A, CLS, *special("b.jpg", tarfile.SYMTYPE, linkname="x" * 200)], "b.jpg' is a symbolic link"),
    "device": ([A, CLS, *special("b.jpg", tarfile.CHRTYPE)], "b.jpg' is a device or a pipe"),
    "pipe": ([A, CLS, *special("b.jpg", tarfile.FIFOTYPE)], "b.jpg' is a device or a pipe"),
    "sparse": ([A, CLS, *special("b.jpg", tarfile.GNUTYPE_SPARSE)], "b.jpg' is a sparse file"),
    "POSIX sparse": ([A, *special("b.jpg", b"0", pax_headers={"GNU.sparse.major": "1"})], "b.jpg' is a sparse file"),
    "unknown kind": ([A, CLS, *special("b.jpg", b"V")], "b.jpg' is not a file"),
    "absolute": ([("/etc/a.jpg", b"")], "/etc/a.jpg' has an absolute name"),
    "leads out": ([("x/../../a.jpg", b"")], "a.jpg' leads out of the archive"),
    "unprintable": ([("a\x1b[31m.jpg", b"")], "a\\x1b[31m.jpg' has an unprintable name"),
    "no class": ([A, ("b.jpg", IMAGES[1]), ("b.cls", b"0")], "a.jpg' has no class: no .cls and no .json beside it"),
    "two images": ([A, ("a.png", IMAGES[1]), CLS], "a.jpg and a.png: two images in one sample"),
    "a member twice": ([A, A, CLS], "a.jpg' occurs twice"),
    "a sample twice": ([A, CLS, ("b.txt", b""), A, CLS], "a.jpg': its sample occurs twice"),
    "no name": ([A, ("a.cls", b"\xff")], r"a.cls': states no class"),
    "empty": ([A, ("a.cls", b" ")], "a.cls': '' is not a name of a class"),
    "long": ([A, ("a.cls", b"x" * 300)], "is not a name of a class"),
    "bytes": ([A, ("a.cls", b"x" * 70_000)], "a.cls': claims 70,000 bytes"),
    "a JSON of none": ([A, ("a.json", b'{"width": 1}')], "a.json': states no class, such as {'label': 3}, but None"),
    "no JSON": ([A, ("a.json", b"[" * 60_000)], "a.json': states no class"),
    "a truth": ([A, ("a.json", b'{"label": true}')], "a.json': states no class, such as {'label': 3}, but True"),
    "a number among names": (
        [*sample(0, "cat"), *sample(1, "dog"), *sample(2, 3)],
        "n01440764_2.webp' has the class '3', and others such as 'cat': numbers and names",
    ),
    "a name among numbers": (
        [*sample(0, 3), *sample(1, 4), *sample(2, "cat")],
        "n01440764_2.webp' has the class 'cat', and others such as '3': numbers and names",
    ),
    "dots in all names": (
        list(sample(0, 0, key="img.{}")),
        "no shard holds an image (.jpg,",
    ),
    "dots in some names": (
        [*sample(0, 0, key="img.{}"), *sample(1, 1, key="b{}"), *sample(3, 0, key="img.{}")],
        "img.3.jpg': its sample occurs twice (the name of a sample ends at its first dot",
    ),
    "a huge number": ([*sample(0, 0), *sample(1, 9_999_999)], "has the class '9999999', those"),
    "two spellings": ([*sample(0, "cat"), *sample(1, "Cat")], "'Cat' and 'cat' are spellings of one class"),
    "no image": ([("a.txt", b""), ("n0.tar", b"")], "no shard holds an image (.jpg,"),
    "an image that claims too much": (with_claim("b.jpg", 300 << 20), "b.jpg': claims 314,572,800 bytes"),
    "cut in an image": (cut(2560), "0.jpg' is cut off"),
    "cut in a header": (cut(100), "is cut off or damaged (no tar header and no end mark at byte 0)"),
    "no end": (lambda path: path.write_bytes(tar(path, sample(0)).read_bytes().rstrip(b"\0")), "is cut off"),
    "a zeroed header": (zeroed, "ends at byte 3,072, with further bytes after it"),
    "two tars": (lambda path: path.write_bytes(2 * tar(path, sample(0)).read_bytes()), "with further bytes after it"),
    "space for what did not come": (
        lambda path: path.write_bytes(tar(path, sample(0)).read_bytes() + bytes(1 << 20)),
        "with zeros after it",
    ),
    "a pipe": (os.mkfifo, "0.tar: cannot be read (it is not a regular file)"),
    "a link to nothing": (lambda path: path.symlink_to("1.tar"), "cannot be read (No such file or directory); fix"),
    "empty file": (lambda path: path.write_bytes(b""), "is cut off or damaged"),
    "no tar": (lambda path: path.write_bytes(b"<html>" * 999), "is cut off or damaged"),
    "a flipped bit": (flipped, "is cut off or damaged"),
    "compressed": (
        lambda path: path.write_bytes(gzip.compress(tar(path, sample(0)).read_bytes())),
        "is a compressed file: unpack it to a .tar",
    ),
    **{
        f"compressed by {name}": (
            lambda path, start=start: path.write_bytes(start + bytes(999)),
            "is a compressed file",
        )
        for name, start in {
            "zstd": b"\x28\xb5\x2f\xfd",
            "pzstd": b"P*M\x18",
            "lz4": b'\x04"M\x18',
            "lzma": b"]\0\0",
        }.items()
    },
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_webdataset_messages_of_damage(kind, tmp_path):
    """The catalogue of messages: each names the shard, and the member where there is one, in one line."""
    damage, message = DAMAGE[kind]
    path = tmp_path / "s/train/0.tar"
    if callable(damage):
        path.parent.mkdir(parents=True)
        damage(path)
    else:
        tar(path, damage)
    with pytest.raises(DataError, match=naming(message)) as caught:
        open_split(tmp_path / "s", "train")
    assert str(caught.value).startswith(str(tmp_path / "s/train"))
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.rglob("*") if not each.is_dir()] == ["0.tar"]


def test_webdataset_a_class_that_only_validation_has_is_refused(tmp_path):
    tar(tmp_path / "s/train/0.tar", sample(0, 2))
    tar(tmp_path / "s/val/0.tar", sample(1, 3))
    with pytest.raises(DataError, match=naming("s/val/0.tar", "n01440764_1.png", "class '3'", "0 to 2")):
        open_split(tmp_path / "s", "val")


@pytest.mark.parametrize("member", ["a.json", "a.x.jpg"])
def test_webdataset_a_split_without_an_image_is_refused(tmp_path, member):
    tar(tmp_path / "s/train/0.tar", sample(0, 0))
    tar(tmp_path / "s/val/0.tar", [(member, b"{}")])
    open_split(tmp_path / "s", "train")
    with pytest.raises(DataError, match=naming(tmp_path / "s", "for val", "no image")):
        open_split(tmp_path / "s", "val")


def test_webdataset_is_indexed_once_and_anew_if_a_shard_changed(tmp_path, capsys):
    root = hub(tmp_path / "hub")
    open_split(root, "train")
    assert "8 images" not in capsys.readouterr().out
    before = (root / "webdataset.index").stat().st_mtime_ns
    open_split(root, "val")
    assert (root / "webdataset.index").stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""
    tar(root / "imagenet1k-train-0001.tar", [*sample(10), *sample(11)])
    assert held(open_split(root, "train")) == [*IMAGES[:4], *IMAGES[10:]]
    (root / "imagenet1k-train-0000.tar").unlink()
    assert held(open_split(root, "train")) == IMAGES[10:]
    for damage in (b"", b"{}\n", b"[" * 10_000, (root / "webdataset.index").read_bytes()[:-1]):
        (root / "webdataset.index").write_bytes(damage)
        assert held(open_split(root, "train")) == IMAGES[10:]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("shard", 9), ("shard", -1), ("offset", 0), ("offset", 1 << 40), ("length", -1)),
        *(("label", 7), ("name_end", 1 << 40)),
    ],
)
def test_webdataset_an_index_that_someone_edited_is_made_anew(tmp_path, field, value):
    root = hub(tmp_path / "hub")
    index = webdataset.read_webdataset(root, webdataset.find_shards(root))
    entries_N = index.entries_N.copy()
    entries_N[field][3] = value
    (root / "webdataset.index").write_bytes(replace(index, entries_N=entries_N).to_bytes())
    assert held(open_split(root, "train")) == IMAGES[:8]


@pytest.mark.parametrize("edit", [{"left_out": {"train": 5}}, {"left_out": []}, {"classes": ["a", "a"]}])
def test_webdataset_an_index_whose_first_line_someone_edited_is_made_anew(tmp_path, edit):
    root = hub(tmp_path / "hub")
    open_split(root, "train")
    line, _, rest = (root / "webdataset.index").read_bytes().partition(b"\n")
    (root / "webdataset.index").write_bytes(json.dumps(json.loads(line) | edit).encode() + b"\n" + rest)
    assert held(open_split(root, "train")) == IMAGES[:8]
    assert json.loads((root / "webdataset.index").read_bytes().partition(b"\n")[0]) == json.loads(line)


def test_webdataset_keeps_the_index_in_the_cache_if_the_folder_cannot_be_written(tmp_path, monkeypatch, capsys):
    root, write_whole = hub(tmp_path / "hub"), webdataset.write_whole

    def refuse(path, data):
        if path.parent == root:
            raise OSError(30, os.strerror(30))
        write_whole(path, data)

    monkeypatch.setattr(webdataset, "write_whole", refuse)
    assert held(open_split(root, "train")) == IMAGES[:8]
    assert "the index is stored in " + str(tmp_path / "cache/webdataset") in capsys.readouterr().err
    assert held(open_split(root, "val")) == IMAGES[8:10]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(webdataset, "measured_folder", lambda name: None)
    assert held(open_split(root, "train")) == IMAGES[:8]
    assert "each start makes it again" in capsys.readouterr().err


def other_bytes(path):
    """Write other bytes of the same length, with another time of change."""
    data = tar(path.with_name("other"), [each for n in (4, 5, 6, 7) for each in sample(n, key="x{}")]).read_bytes()
    with open(path, "r+b") as file:
        file.write(data.ljust(path.stat().st_size, b"\0")[: path.stat().st_size])


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("damage", [other_bytes, lambda path: os.truncate(path, 700), lambda path: path.unlink()])
def test_webdataset_a_shard_that_is_replaced_during_training_is_named(tmp_path, damage, is_open):
    root = hub(tmp_path / "hub")
    found = open_split(root, "train")
    if is_open:
        found.read(0)
    damage(root / "imagenet1k-train-0000.tar")
    if is_open and damage.__name__ == "<lambda>" and not (root / "imagenet1k-train-0000.tar").exists():
        assert held(found) == IMAGES[:8]  # what is open stays as it was
        return
    with pytest.raises(DataError, match=naming("imagenet1k-train-0000.tar", "since")) as caught:
        held(found)
    assert "\n" not in str(caught.value)
    assert found.read(5) == IMAGES[5]


def test_webdataset_names_of_numbered_classes(tmp_path):
    root = hub(tmp_path / "hub")
    open_split(root, "train")
    (root / "classnames.txt").write_text("\ufefftench\ngoldfish\nshark\n")
    assert open_split(root, "val").classes == ("tench", "goldfish", "shark")
    for text, says in (
        ("a\n", "1 lines for 2"),
        ("a\nb\n\n", "empty line"),
        ("a\na\n", "2 classes 'a'"),
        ("a\nA\nbb\nBB\n", "spellings"),
    ):
        (root / "classnames.txt").write_text(text)
        with pytest.raises(DataError, match=naming(root, says)):
            open_split(root, "val")
    (root / "classnames.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=naming(root / "classnames.txt", "UTF-8")):
        open_split(root, "val")
    (root / "classnames.txt").unlink()
    os.mkfifo(root / "classnames.txt")
    with pytest.raises(DataError, match=naming(root / "classnames.txt", "not a regular file")):
        open_split(root, "val")
    (root / "classnames.txt").unlink()
    (root / "webdataset.index").unlink()
    os.mkfifo(root / "webdataset.index")
    assert open_split(root, "val").classes == ("0", "1")


def test_webdataset_names_with_dots_are_left_out_by_their_reason(tmp_path):
    """WebDataset itself takes the name up to the first dot for the sample's."""
    dotted = [("img.1.jpg", IMAGES[0]), ("img.1.cls", b"0"), ("img.2.jpg", IMAGES[3]), ("img.2.cls", b"1")]
    found = open_split(tar(tmp_path / "s/train/0.tar", [*sample(6), *dotted]).parents[1], "train")
    assert held(found) == [IMAGES[6]]
    assert found.left_out == {"with a dot before its suffix": 2}
    assert [sample.rpartition(" ")[2] for each in found.left_out_samples.values() for sample in each] == [
        "img.1.jpg", "img.2.jpg"
    ]  # fmt: skip
    with pytest.raises(DataError, match=naming("2 names, such as", "img.1.jpg", "first dot")):
        open_split(tar(tmp_path / "t/train/0.tar", dotted).parents[1], "train")


@pytest.mark.parametrize("name", ["train/0.tar.gz", "train/0.TGZ", "train-0.tar.xz", "train-0.tar.zst"])
def test_webdataset_compressed_shards_are_told_by_their_names(name, tmp_path, capsys):
    write(tmp_path / "s", {name: b"", name.replace("train", "val"): b""})
    for read in (lambda: open_split(tmp_path / "s", "train"), lambda: find_layout(tmp_path / "s", leave_out=False)):
        with pytest.raises(DataError, match=naming(tmp_path / "s", Path(name).name, "compressed", "gunzip")):
            read()
    write(tmp_path / "s", {name.rpartition(".tar")[0] + "1.tar": b""})  # beside one that is not compressed
    with pytest.raises(DataError, match=naming(tmp_path / "s", Path(name).name, "compressed", "gunzip")):
        open_split(tmp_path / "s", "train")
    assert main(["data", "check", str(tmp_path / "s"), "--workers", "1"]) == 1
    assert "compressed" in capsys.readouterr().err
    write(
        tmp_path / "s", {f"{split}/cat/0.jpg": IMAGES[0] for split in ("train", "val")}
    )  # a download left beside them
    assert len(open_split(tmp_path / "s", "train")) == 1


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["train-val-0.tar"], ("train-val-0.tar", "named train and val")),
        (["validation-0.tar"], ("holds shards for val, but none for train",)),
        (["test-0.tar"], ("train", "no such folder", "*train*.tar")),
        (["train/0.tar", "val/cat/0.jpg"], ("holds shards for train, but none for val",)),
    ],
)
def test_webdataset_splits_that_are_not_there(tmp_path, names, says):
    for name in names:
        tar(tmp_path / "s" / name, sample(0))
    with pytest.raises(DataError, match=naming(*says)):
        [open_split(tmp_path / "s", split) for split in ("train", "val")]


def test_webdataset_class_folders_and_packed_splits_stay_what_they_are(tmp_path):
    folder = write(
        tmp_path / "folder", {f"{split}/a/{n}.jpg": IMAGES[0] for split in ("train", "val") for n in range(2)}
    )
    tar(folder / "train/0.tar", sample(3))
    tar(folder / "train-0.tar", sample(3))
    assert webdataset.find_shards(folder) == {}
    pack(folder, tmp_path / "packed", recipe=PackRecipe())
    (tmp_path / "packed/train/index.json").unlink()
    assert webdataset.find_shards(tmp_path / "packed") == {}


def test_webdataset_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = hub(Path("hub"))
    assert main(["init", "hub", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "hub: train and val; 2 classes, images 8 to train and 2 to validate" in said
    config = load_config(["--config", "hub.yaml"])
    assert (config.data.root, config.data.num_classes) == ("hub", 2)
    assert main(["data", "check", "hub", "--workers", "1"]) == 0
    tar(root / "imagenet1k-train-0002.tar", [*sample(10), ("x.jpg", b"<html>"), ("x.cls", b"1"), ("y.tiff", b"II")])
    assert main(["data", "check", "hub", "--workers", "1"]) == 1
    said = capsys.readouterr().out
    assert "train: HTML or XML instead of an image (1)" in said
    assert "hub/imagenet1k-train-0002.tar: x.jpg: is not an image" in said
    assert "hub/imagenet1k-train-0002.tar: y" in said
    for refuse in (lambda: pack(root, Path("packed"), recipe=PackRecipe()), lambda: stage(root, Path("staged"))):
        with pytest.raises(DataError, match=naming("hub", "WebDataset", "data.root")):
            refuse()
