"""Packed shards give what the class folders give; the oracles are tarfile, Pillow and the folder loader."""

import errno
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sample_images
from benchmark_process import from_checkout
from error_texts import naming
from image_loaders import COMMON_SETTINGS, open_shards, shard_descriptors
from PIL import Image
from sample_images import exif, write

from bigbatch.errors import DataError
from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.order import ImageIndex, eval_requests, read_index
from bigbatch.trainer.input.shards import PackedIndex, read_packed

SETTINGS = COMMON_SETTINGS | {"crop": random_resized_crop(seed=7), "image_size": 64}


def encoded(seed, width=150, height=110, *, mode="RGB", kind="JPEG", **options):
    return sample_images.encoded(sample_images.smooth_image(seed, width, height).convert(mode), kind, **options)


def files():
    """All kinds that ImageNet holds, two classes, names that a tar or a key could stumble over."""
    return {
        "a/plain.JPEG": encoded(0),
        "a/dots.in.its.name.jpg": encoded(1, 120, 200),
        "a/same.jpg": encoded(2, mode="L"),
        "a/same.png": encoded(3, kind="PNG"),
        "a/rotated.JPEG": encoded(4, exif=exif(6)),
        "b/progressive.JPEG": encoded(5, progressive=True),
        "b/cmyk.JPEG": encoded(6, mode="CMYK"),
        "b/png-named.JPEG": encoded(7, 99, 101, kind="PNG"),
        f"b/{'long' * 40}.jpg": encoded(8),
        "b/über.jpg": encoded(9),
        "b/z.jpg": encoded(10, 333, 222),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    return write(root, {f"{split}/{name}": data for split in ("train", "val") for name, data in files().items()})


def packed_from(folder, target, **options):
    pack(folder, target, recipe=PackRecipe(shard_bytes=20_000), **options)
    return target


@pytest.fixture(scope="module")
def packed(folder, tmp_path_factory):
    return packed_from(folder, tmp_path_factory.mktemp("packed"))


@pytest.fixture
def own(folder, tmp_path):
    """A packed set that a test may damage."""
    return packed_from(folder, tmp_path / "own", splits=["train"])


def stored(split_folder):
    """Images and labels as tarfile finds them, shard after shard."""
    found = []
    for path in sorted(split_folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            contents = [tar.extractfile(member).read() for member in tar]
        found += zip(contents[::2], contents[1::2], strict=True)
    return found


def test_shards_any_sample_is_what_tarfile_and_the_folder_hold(folder, packed):
    index, expected, source = open_split(packed, "train"), stored(packed / "train"), read_index(folder, "train")
    assert isinstance(index, PackedIndex)
    assert len(list((packed / "train").glob("*.tar"))) > 2
    assert len(index) == len(expected) == len(source) == len(files())
    assert index.classes == ("a", "b")
    assert index.labels_N.dtype == np.int64
    for position in random.Random(0).choices(range(len(index)), k=50):
        assert index.read(position) == expected[position][0] == Path(source.name(position)).read_bytes()
        assert index.labels_N[position] == int(expected[position][1]) == source.labels_N[position]
    positions_B = np.array([7, 0, 10, 1])
    images = [Image.open(io.BytesIO(expected[position][0])) for position in positions_B]
    assert index.sizes(positions_B).tolist() == [[image.height, image.width] for image in images]
    index.close()


def test_shards_a_split_without_an_index_is_a_class_folder_tree(folder, packed, tmp_path):
    assert isinstance(open_split(folder, "train"), ImageIndex)
    assert isinstance(open_split(packed, "val", classes=["a", "b"]), PackedIndex)
    with pytest.raises(DataError, match=naming("train:", "train/<class>/<image>")):
        open_split(tmp_path, "train")


def test_shards_other_classes_than_those_of_training_are_refused(packed):
    with pytest.raises(DataError, match=naming("val:", "lacks 1", ": c;", "excess 1", ": a;")):
        open_split(packed, "val", classes=["b", "c"])


def edit_facts(**changes):
    def edit(split):
        path = split / "index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_entries(column, value):
    def edit(split):
        entries_N = np.load(split / "index.npy")
        entries_N[column][4] = value
        np.save(split / "index.npy", entries_N)

    return edit


def swap_entries(split):
    entries_N = np.load(split / "index.npy")
    entries_N[[0, 1]] = entries_N[[1, 0]]
    np.save(split / "index.npy", entries_N)


def restated(edit):
    """Return edit with the hash of index.npy corrected."""

    def edit_both(split):
        edit(split)
        edit_facts(entries_sha256=hashlib.sha256((split / "index.npy").read_bytes()).hexdigest())(split)

    return edit_both


def resize(name, change):
    def edit(split):
        os.truncate(split / name, (split / name).stat().st_size + change)

    return edit


def replace(name, data):
    return lambda split: (split / name).write_bytes(data)


def shorten_entries(split):
    np.save(split / "index.npy", np.load(split / "index.npy")[:-1])


def save_objects(split):
    np.save(split / "index.npy", np.array([{}]), allow_pickle=True)


def as_pipe(name):
    return lambda split: ((split / name).unlink(), os.mkfifo(split / name))


DAMAGE = {
    "no facts": (lambda split: (split / "index.json").unlink(), r"train: packing has not finished"),
    "facts are a folder": (
        lambda split: ((split / "index.json").unlink(), (split / "index.json").mkdir()),
        r"index.json: cannot be read",
    ),
    "facts are a pipe": (as_pipe("index.json"), r"index.json: cannot be read .*not a regular file"),
    "entries are a pipe": (as_pipe("index.npy"), r"index.npy: cannot be read .*not a regular file"),
    "facts are not text": (replace("index.json", b"\xff"), r"index.json: cannot be read"),
    "facts are not JSON": (replace("index.json", b"{"), r"index.json: is not an index of packed shards"),
    "facts are too deep": (replace("index.json", b"[" * 100_000), r"index.json: is not an index of packed shards"),
    "facts lack a key": (replace("index.json", b'{"version": 1}'), r"index.json: is not an index of packed shards"),
    "another version": (edit_facts(version=2), r"index.json: has format version 2, this bigbatch reads 1; pack again"),
    "classes not in order": (edit_facts(classes=["b", "a"]), r"index.npy: does not fit .*classes are not in order"),
    "another number": (edit_facts(num_pictures=12), r"index.npy: does not fit index.json \(\(11,\) entries"),
    "fewer shards": (edit_facts(shards=[]), r"index.npy: does not fit .*in none of 0 shards"),
    "no entries": (lambda split: (split / "index.npy").unlink(), r"index.npy: cannot be read .*No such file"),
    "entries cut": (resize("index.npy", -1), r"index.npy: has another SHA-256 than index.json states: cut or edited"),
    "another label": (edit_entries("label", 1), r"index.npy: has another SHA-256 than index.json states"),
    "entries swapped": (swap_entries, r"index.npy: has another SHA-256 than index.json states"),
    "entries cut before": (restated(resize("index.npy", -1)), r"index.npy: cannot be read"),
    "entries empty": (restated(replace("index.npy", b"")), r"index.npy: cannot be read"),
    "entries pickled": (restated(save_objects), r"index.npy: cannot be read"),
    "entries fewer": (restated(shorten_entries), r"index.npy: does not fit index.json \(\(10,\) entries"),
    "unknown shard": (restated(edit_entries("shard", 99)), r"lies in none of \d shards"),
    "offset in a header": (restated(edit_entries("offset", 10)), r"outside of its shard"),
    "offset past the end": (restated(edit_entries("offset", 10**6)), r"outside of its shard"),
    "no length": (restated(edit_entries("length", 0)), r"outside of its shard"),
    "unknown label": (restated(edit_entries("label", 2)), r"a label is not one of 2 classes"),
    "no height": (restated(edit_entries("height", 0)), r"an image has no pixels"),
    "no width": (restated(edit_entries("width", 0)), r"an image has no pixels"),
    "shard missing": (lambda split: (split / "shard-000001.tar").unlink(), r"shard-000001.tar: .*\(No such"),
    "shard cut": (resize("shard-000001.tar", -512), r"shard-000001.tar: has \d+ bytes, index.json states \d+"),
    "shard grown": (resize("shard-000001.tar", 512), r"shard-000001.tar: has \d+ bytes, index.json states \d+"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_open_split_messages_of_damage(own, kind):
    """The room's catalogue of messages: the one test here that holds whole sentences."""
    damage, message = DAMAGE[kind]
    open_split(own, "train")
    damage(own / "train")
    with pytest.raises(DataError, match=message) as caught:
        open_split(own, "train")
    assert "\n" not in str(caught.value)
    assert "pack` again" in str(caught.value) or "pack again" in str(caught.value)


def in_shard(index, *, number):
    """The first position that lies in a shard."""
    return next(position for position in range(len(index)) if f"shard-{number:06d}.tar" in index.name(position))


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda shard: shard.unlink(), (os.strerror(errno.ENOENT), "moved")),
        (lambda shard: (shard.unlink(), os.mkfifo(shard)), ("cannot be read",)),
        (lambda shard: os.truncate(shard, 700), ("cut", "`bigbatch data pack`")),
        (lambda shard: shard.write_bytes(b"x" * shard.stat().st_size), ("index.npy", "`bigbatch data pack`")),
        (lambda shard: shard.write_bytes((shard.parent / "shard-000001.tar").read_bytes()), ("`bigbatch data pack`",)),
    ],
)
def test_shards_damage_after_opening_names_shard_and_image(make, own, damage, parts):
    index = open_split(own, "train")
    position = in_shard(index, number=0)
    damage(own / "train/shard-000000.tar")
    asked = list(eval_requests(num_samples=len(index), microbatch_size=1, rank=0, world_size=1))
    with pytest.raises(DataError, match=naming(f"shard-000000.tar: image {position:08d}: ", *parts)) as caught:
        list(make(index, microbatch_size=1).load(asked))
    assert "\n" not in str(caught.value)
    assert len(index.read(in_shard(index, number=1))) > 0  # the others are as good as before


def test_shards_an_index_that_is_cut_after_opening_is_not_needed_any_more(own):
    """Mapped into memory it would end the process by SIGBUS, without a word."""
    index = open_split(own, "train")
    os.truncate(own / "train/index.npy", 0)
    assert [index.read(n) for n in range(len(index))] == [data for data, _ in stored(own / "train")]


def test_shards_a_shard_that_could_not_be_opened_for_a_while_is_opened_then(make, packed, monkeypatch, capsys):
    index, opened, num_refused = open_split(packed, "train"), os.open, [0]

    def refuse(*given):
        num_refused[0] += 1
        if num_refused[0] <= 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(*given)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataError, match=naming("image 00000000: ", "`ulimit -n ")):
        index.read(0)
    loader = make(index, microbatch_size=1, patience_seconds=20.0)
    asked = list(eval_requests(num_samples=len(index), microbatch_size=1, rank=0, world_size=1))
    assert len(list(loader.load(asked))) == len(index)
    assert num_refused[0] > 3


def test_shards_a_handle_that_went_stale_is_opened_anew(packed):
    """After ESTALE the descriptor fails for good, and the path is fine."""
    index, (expected, _) = open_split(packed, "train"), stored(packed / "train")[0]
    assert index.read(0) == expected
    (mine,) = shard_descriptors(packed)
    folder = os.open(packed, os.O_RDONLY)  # reading it is an error
    os.dup2(folder, mine)
    os.close(folder)
    with pytest.raises(DataError, match=naming("image 00000000: ", os.strerror(errno.EISDIR))):
        index.read(0)
    assert index.read(0) == expected
    index.close()


def test_shards_are_opened_when_needed_bounded_and_released(packed, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (6, 4096))  # a third of it
    index = read_packed(packed / "train")
    shards = index.facts.shards
    assert open_shards(packed) == set()
    index.read(0)
    assert open_shards(packed) == {str(packed / "train/shard-000000.tar")}
    for position in range(len(index)):
        index.read(position)
    assert open_shards(packed) == {str(packed / f"train/{shard.name}") for shard in shards[-2:]}
    index.read(in_shard(index, number=len(shards) - 2))
    index.read(0)  # makes room by closing what was not used for longest: the last shard
    assert open_shards(packed) == {str(packed / "train" / shards[n].name) for n in (-2, 0)}
    index.close()
    index.close()
    assert open_shards(packed) == set()
    assert len(index.read(0)) > 0
    index.close()


def test_shards_threads_read_right_while_shards_are_closed_under_them(packed, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (3, 4096))  # one shard
    index = read_packed(packed / "train")
    expected = [data for data, _ in stored(packed / "train")]

    def read(seed):
        for position in random.Random(seed).choices(range(len(index)), k=200):
            assert index.read(position) == expected[position]
            if position == 0:
                index.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(read, range(6)))
    index.close()
    assert not open_shards(packed)


def test_shards_parts_of_a_read_are_put_together(packed, monkeypatch):
    whole, index = os.pread, open_split(packed, "train")
    monkeypatch.setattr(os, "pread", lambda file, length, offset: whole(file, min(length, 1000), offset))
    assert [index.read(n) for n in range(len(index))] == [data for data, _ in stored(packed / "train")]


LIMITED = """
import os, resource, sys
from pathlib import Path
from bigbatch.trainer.input.data_root import open_split
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
splits = [open_split(Path(sys.argv[1]), split) for split in ("train", "val")]
def read_all():
    for index in splits:
        for position in range(len(index)):
            index.read(position)
read_all()
for index in splits:
    index.close()
others = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
read_all()
"""


def test_shards_two_splits_of_many_shards_share_what_may_be_open(tmp_path):
    """Also when others hold most of it: 13 for each split, 3 for the process and 20 are more than 40."""
    small = {f"{split}/a/{n}.jpg": encoded(n, 20, 20) for split in ("train", "val") for n in range(30)}
    pack(write(tmp_path / "many", small), tmp_path / "packed", recipe=PackRecipe(shard_bytes=1))
    subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "packed"], env=from_checkout(), check=True)


def test_shards_processes_that_only_pack_do_without_torch():
    modules = "bigbatch.trainer.datasets.generated, bigbatch.trainer.datasets.pack, bigbatch.trainer.input.shards"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=from_checkout(), check=True)
