"""Staging: the same bytes or nothing, gone on with where it was, by one process at a time, and every refusal."""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path

import pytest
import sample_images
from benchmark_process import from_checkout
from error_texts import naming

from bigbatch import files
from bigbatch.cli import main
from bigbatch.errors import ConfigError, DataError
from bigbatch.locks import try_lock
from bigbatch.trainer.datasets import stage as stage_module
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.datasets.stage import open_folder, stage, using_copy
from bigbatch.trainer.datasets.verify_shards import verify
from bigbatch.trainer.input.data_root import open_split

FILES = {
    f"{split}/{name}/{n}.jpg": sample_images.encoded(sample_images.smooth_image(n))
    for split, numbers in (("train", range(8)), ("val", range(8, 12)))
    for name in ("a", "b")
    for n in numbers
}
Usage = namedtuple("Usage", ("total", "used", "free"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Packed once."""
    root = tmp_path_factory.mktemp("made")
    pack(sample_images.write(root / "folders", FILES), root / "packed", recipe=PackRecipe(shard_bytes=25_000))
    return root


@pytest.fixture
def source(made, tmp_path):
    shutil.copytree(made / "packed", tmp_path / "source")
    assert len(list((tmp_path / "source/train").glob("*.tar"))) > 2
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path):
    return tmp_path / "node" / "staged"


@pytest.fixture
def read(monkeypatch):
    """The files that are copied from the source, as train/index.npy."""
    names, chunks = [], stage_module._chunks

    def noted(path):
        names.append(f"{path.parent.name}/{path.name}")
        return chunks(path)

    monkeypatch.setattr(stage_module, "_chunks", noted)
    return names


def staged(root):
    """What training looks at, and whatever else should not be there."""
    ours = ("pack.json", ".stage.users", ".staged")
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name not in ours}


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def looks_whole(folder):
    try:
        open_split(folder.parent, folder.name)
    except DataError:
        return False
    return True


@pytest.mark.parametrize("num_workers", [1, 4])
def test_stage_a_copy_holds_the_images(source, target, num_workers):
    calls = []
    summary = stage(source, target, num_workers=num_workers, on_progress=lambda *call: calls.append(call))
    assert staged(target) == staged(source)
    for split in ("train", "val"):
        index = open_split(target, split)
        names = sorted(name for name in FILES if name.startswith(split))
        assert [index.read(position) for position in range(len(index))] == [FILES[name] for name in names]
    assert verify(target) == len(FILES)
    total = sum(p.stat().st_size for p in source.rglob("*") if p.suffix in (".tar", ".npy"))
    assert (summary.num_images, summary.bytes_copied, summary.bytes_kept) == (len(FILES), total, 0)
    assert summary.num_shards == len(list(source.rglob("*.tar")))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert (calls[0], calls[-1]) == ((0, total), (total, total)), "the size is known before the first file is there"


def test_stage_index_json_comes_last(source, target, monkeypatch):
    """Whatever is there when it is written is whole."""
    replace, order = os.replace, []
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append(Path(new).name), replace(old, new)))
    stage(source, target, splits=["val"], num_workers=3)
    shards = {p.name for p in (source / "val").glob("*.tar")}
    assert order[0] == ".staged"
    assert set(order[1:-1]) == {*shards, "index.npy"}
    assert order[-1] == "index.json"


def test_stage_a_complete_copy_is_left_at_once(source, target, read, monkeypatch):
    stage(source, target)
    read.clear()
    before = {p: p.stat().st_mtime_ns for p in target.rglob("*")}
    monkeypatch.setattr(stage_module, "sha256_of", lambda path: pytest.fail("reads a shard"))
    for path in source.rglob("*.tar"):
        path.unlink()  # nor does it look at those of the source
    calls = []
    summary = stage(source, target, on_progress=lambda *call: calls.append(call))
    assert (summary.bytes_copied, summary.bytes_kept, read, calls) == (0, 0, [], [])
    assert re.fullmatch(r"24 images in \d+ shards, complete already", str(summary))
    assert {p: p.stat().st_mtime_ns for p in target.rglob("*")} == before


def flip_byte(path, position=2000):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_stage_a_copy_that_others_could_plant_is_read(source, target):
    """Sizes are public, and bytes may be another user's if others may write."""
    stage(source, target)
    assert target.stat().st_mode & 0o777 == 0o700
    target.chmod(0o777)
    flip_byte(target / "train/shard-000001.tar")
    stage(source, target)
    assert target.stat().st_mode & 0o777 == 0o755
    assert verify(target) == len(FILES)
    assert staged(target) == staged(source)


def test_stage_a_folder_of_another_user_is_refused(source, target, monkeypatch):
    target.mkdir(parents=True)
    monkeypatch.setattr(stage_module.os, "geteuid", lambda: target.stat().st_uid + 1)
    with pytest.raises(DataError, match=naming(target, "another user")):
        stage(source, target)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../../outside", "/outside", "shard-000002.tar", "index.json", "a/../shard-000001.tar"]
)
def test_stage_an_index_whose_shards_have_other_names_is_refused(name, source, target, tmp_path):
    """One that led elsewhere was written and removed there."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    facts = json.loads((source / "train/index.json").read_text())
    facts["shards"][1]["name"] = name
    (source / "train/index.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=naming(source / "train/index.json", "shard-000001.tar")):
        stage(source, target)
    assert outside.read_text() == "mine"
    assert not list(target.rglob("*.tar"))


def test_stage_a_spoilt_copy_does_not_stay_if_it_cannot_be_mended(source, target):
    """Its index.json is there already."""
    stage(source, target)
    for root in (source, target):
        flip_byte(root / "train/shard-000001.tar")
    (target / "train/.staged").unlink()
    with pytest.raises(
        DataError, match=naming("source/train/shard-000001.tar", "bytes", "delete", "`bigbatch data pack`")
    ):
        stage(source, target)
    assert not looks_whole(target / "train")


@pytest.mark.parametrize("mark", [None, b"9f3c (of another program)"])
def test_stage_a_copy_by_other_means_is_read_once_and_kept(source, target, read, mark):
    shutil.copytree(source, target)  # pack.json, too
    if mark:
        (target / "train/.staged").write_bytes(mark)
    assert stage(source, target).bytes_kept > 0
    assert stage(source, target).bytes_kept == 0
    assert read == []


def test_stage_a_copy_by_other_means_that_was_not_read_to_its_end_is_read_again(source, target):
    shutil.copytree(source, target)
    flip_byte(target / "val/shard-000000.tar")

    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(source, target, on_progress=interrupt)
    stage(source, target)
    assert staged(target) == staged(source)


KILLED = """
import os, signal, sys
from pathlib import Path
from bigbatch.trainer.datasets import stage as module
chunks = module._chunks
def kill_at(path):
    for chunk in chunks(path):
        yield chunk[:100]
        if str(path).endswith(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield chunk[100:]
module._chunks = kill_at
module.stage(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_stage_a_killed_copy_goes_on_where_it_was(source, target, read):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, source, target, "train/shard-000002.tar"], env=from_checkout(), timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list(target.rglob(".*.unfinished"))) == 1, "it was killed in the middle of a shard"
    assert not looks_whole(target / "train")
    kept = sorted(path.name for path in target.rglob("*.tar"))
    assert kept == ["shard-000000.tar", "shard-000001.tar"]
    summary = stage(source, target)
    wanted = {str(p.relative_to(source)) for p in source.rglob("*") if p.suffix in (".tar", ".npy")}
    assert sorted(read) == sorted(wanted - {f"train/{name}" for name in kept})
    assert summary.bytes_kept == sum((source / "train" / name).stat().st_size for name in kept)
    assert " GB were there already) in " in str(summary)
    assert staged(target) == staged(source)


def test_stage_an_interrupt_leaves_no_half_file_and_frees_the_folder(source, target):
    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(source, target, num_workers=2, on_progress=interrupt)
    assert not list(target.rglob("*.unfinished"))
    assert not looks_whole(target / "train")
    stage(source, target, on_wait=lambda: pytest.fail("the lock is still held"))
    assert staged(target) == staged(source)


def test_stage_an_error_stops_the_copies_under_way(source, target, monkeypatch):
    deadline = time.monotonic() + 200

    def chunks(path):
        if path.name == "shard-000000.tar":
            raise DataError("gone")
        while time.monotonic() < deadline:
            yield b"endless"
        pytest.fail("was not stopped")

    monkeypatch.setattr(stage_module, "_chunks", chunks)
    with pytest.raises(DataError, match="gone"):
        stage(source, target, num_workers=3)
    assert time.monotonic() < deadline
    assert not list(target.rglob("*.unfinished"))


@pytest.mark.parametrize(
    ("damage", "name", "parts"),
    [
        (flip_byte, "shard-000001.tar", ("bytes", "delete")),
        (lambda path: os.truncate(path, 999), "shard-000001.tar", ("999 bytes", "index.json")),
        (Path.unlink, "index.npy", (os.strerror(errno.ENOENT),)),
        (lambda path: flip_byte(path, 200), "index.npy", ("SHA-256", "index.json")),
        (Path.unlink, "index.json", (os.strerror(errno.ENOENT),)),
        (lambda path: path.write_text("{"), "index.json", ("index of", "delete")),
    ],
)
def test_stage_a_damaged_source_is_named(source, target, damage, name, parts):
    damage(source / "train" / name)
    with pytest.raises(DataError, match=naming(source / "train" / name, *parts, "`bigbatch data pack`")) as raised:
        stage(source, target, num_workers=3)
    assert "\n" not in str(raised.value)
    assert not looks_whole(target / "train")
    assert not list(target.rglob("*.unfinished"))


def test_stage_a_source_that_vanishes_while_it_is_copied_is_named(source, target, monkeypatch):
    chunks = stage_module._chunks

    def vanish(path):
        if path.name == "shard-000001.tar":
            path.unlink()
        yield from chunks(path)

    monkeypatch.setattr(stage_module, "_chunks", vanish)
    with pytest.raises(DataError, match=naming("shard-000001.tar", os.strerror(errno.ENOENT), "restore")):
        stage(source, target)
    assert not looks_whole(target / "train")
    assert (target / "train/shard-000000.tar").exists(), "what was copied is kept"


@pytest.mark.parametrize("name", ["shard-000001.tar", "index.json"])
def test_stage_a_disk_that_fills_up_is_named_and_gone_on_with(source, target, monkeypatch, name):
    def open_there(path, mode="r", **options):
        if name not in path.name or mode != "xb":
            return open(path, mode, **options)
        path.write_bytes(b"half")
        return open("/dev/full", "wb")

    monkeypatch.setattr(files, "open", open_there, raising=False)
    with pytest.raises(DataError, match=naming(target, os.strerror(errno.ENOSPC))):
        stage(source, target)
    assert not looks_whole(target / "train")
    assert not list(target.rglob("*.unfinished"))
    monkeypatch.undo()
    kept = list(target.rglob("*.tar"))
    assert kept
    assert stage(source, target).bytes_kept >= sum(path.stat().st_size for path in kept)
    assert staged(target) == staged(source)


@pytest.mark.parametrize(("is_memory", "left"), [(True, 1000), (True, math.inf), (False, 1000)])
def test_stage_room_in_memory_is_that_of_the_job(source, target, monkeypatch, is_memory, left):
    """A file system may have room where the job's limit has none: more would end the job."""
    monkeypatch.setattr(stage_module, "lies_in_memory", lambda path: is_memory)
    monkeypatch.setattr(stage_module, "memory_left", lambda: left)
    if is_memory and left == 1000:
        with pytest.raises(DataError, match=naming(f"{target}:", "1e-06 GB are free", "memory of this job", "DST")):
            stage(source, target)
        return
    stage(source, target)
    assert staged(target) == staged(source)


def test_stage_room_is_looked_for_first_and_counts_what_is_there(source, target, monkeypatch, read):
    total = sum(p.stat().st_size for p in source.rglob("*") if p.suffix in (".tar", ".npy"))
    free = [total - 1]
    left = {".shard-000000.tar.unfinished": b"cut", ".shard-000099.tar.unfinished": b"cut"}
    sample_images.write(target / "train", left)
    monkeypatch.setattr(stage_module.shutil, "disk_usage", lambda path: Usage(10**12, 0, free[0]))
    with pytest.raises(DataError, match=naming(f"{target}:", "DST")) as raised:
        stage(source, target)
    sizes = re.findall(r"(\S+) GB", str(raised.value))
    assert sizes == [f"{total / 1e9:.4g}", f"{free[0] / 1e9:.4g}"]
    assert read == []
    assert list((target / "train").iterdir()) == [], "what is of no use makes room first"
    first = source / "train/shard-000000.tar"
    shutil.copy(first, target / "train")
    shutil.copy(source / "train/index.json", target / "train/.staged")
    free[0] -= first.stat().st_size - 1
    stage(source, target)
    assert staged(target) == staged(source)


def test_stage_another_data_set_is_refused_and_stays(source, target, tmp_path):
    pack(sample_images.write(tmp_path / "other", FILES), tmp_path / "packed", recipe=PackRecipe(shard_bytes=60_000))
    stage(tmp_path / "packed", target)
    before = staged(target)
    with pytest.raises(DataError, match=naming("staged/train/index.json", source / "train", "delete")):
        stage(source, target)
    assert staged(target) == before


def test_stage_a_pipe_in_place_of_the_copied_index_is_named(source, target):
    stage(source, target)
    (target / "val/index.json").unlink()
    os.mkfifo(target / "val/index.json")
    with pytest.raises(DataError, match=naming(target, "not a regular file")):
        stage(source, target)


@pytest.mark.parametrize("name", ["mine.txt", "shard-000000.tar", "pack.json", "a/0.jpg", ".staged"])
def test_stage_a_folder_with_something_else_is_refused_and_stays(source, target, name):
    files = {name: b"mine", ".shard-000000.tar.unfinished": b"a packer's"}
    sample_images.write(target / "val", files)
    with pytest.raises(DataError, match=naming(target / "val" / name.split("/")[0], source / "val", "delete")):
        stage(source, target)
    assert {name: (target / "val" / name).read_bytes() for name in files} == files
    assert not looks_whole(target / "train")


def test_stage_a_part_of_another_data_set_is_refused(source, target):
    stage(source, target)
    (target / "train/index.json").unlink()
    facts = json.loads((source / "train/index.json").read_text())
    (source / "train/index.json").write_text(json.dumps(facts, indent=2))
    with pytest.raises(DataError, match=naming("staged/train/.staged", source / "train")):
        stage(source, target)


def test_stage_class_folders_are_to_be_packed_first(made, source, target):
    with pytest.raises(DataError, match=naming("folders/train", "`bigbatch data pack SRC DST`")):
        stage(made / "folders", target)
    with pytest.raises(DataError, match=naming("source/nothing", "train, val", "DST", "`bigbatch data pack`")):
        stage(source / "nothing", target)
    with pytest.raises(DataError, match=naming("source/train", "another DST")):
        stage(source, source)
    with pytest.raises(ConfigError, match=naming("num_workers=0", "1")):
        stage(source, target, num_workers=0)
    assert not target.exists()


def test_stage_one_split_will_do(source, target):
    """A data set with one split, such as ImageNet-V2."""
    shutil.rmtree(source / "train")
    assert stage(source, target).num_images == 8
    assert sorted(p.name for p in target.iterdir()) == ["val"]
    assert looks_whole(target / "val")


@pytest.mark.parametrize(
    ("in_the_way", "named", "reason"),
    [
        ("node", "node:", "no folder"),
        ("node/staged", "node/staged:", "no folder"),
        ("node/staged/val", "node/staged/val:", os.strerror(errno.ENOTDIR)),
    ],
)
def test_stage_a_target_that_cannot_be_made_is_named(source, target, tmp_path, in_the_way, named, reason):
    sample_images.write(tmp_path, {in_the_way: b"a file"})
    with pytest.raises(DataError, match=naming(named, reason)):
        stage(source, target)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_stage_a_file_system_without_locks_is_refused(source, target, monkeypatch, number):
    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DataError, match=naming(target, "locked", os.strerror(number))):
        stage(source, target)


def test_stage_of_two_processes_one_copies_and_both_find_it_whole(source, target):
    """This process holds the folder until both wait for it."""
    command = [sys.executable, "-m", "bigbatch", "data", "stage", source, target, "--workers", "2", "--json"]
    target.mkdir(parents=True)
    with open_folder(target) as lock:
        assert try_lock(lock)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, env=from_checkout(), **pipes) for _ in range(2)]
        for process in processes:
            assert re.search(naming("waiting", target), process.stderr.readline())
        assert list(target.iterdir()) == []
    found = [json.loads(process.communicate(timeout=200)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    total = sum(p.stat().st_size for p in source.rglob("*") if p.suffix in (".tar", ".npy"))
    assert sorted(summary["bytes_copied"] for summary in found) == [0, total]
    assert staged(target) == staged(source)


def test_stage_the_command(source, target, made, capsys):
    assert main(["data", "stage", str(source), str(target), "--workers", "2"]) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    speed = r"[\d.e-]+ GB copied in [\d.]+ s, [\d.e-]+ GB/s"
    assert re.fullmatch(rf"{target}: 24 images in \d+ shards, {speed}", first)
    assert second == f"in the config: data.root: {target}"
    assert err.splitlines()[-1] == f"staging {target}: 1 of 1 MB"
    assert main(["data", "stage", str(source), str(target), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["root"], found["num_pictures"], found["bytes_copied"]) == (str(target), 24, 0)
    assert main(["data", "stage", str(made / "folders"), str(target)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(naming(made / "folders/train", "`bigbatch data pack SRC DST`"), line)


def test_using_copy_the_last_user_removes_what_was_staged_and_nothing_else(source, target):
    with using_copy(target, keep=True):
        with using_copy(target, keep=False):
            stage(source, target)
        assert staged(target) == staged(source), "another uses it"
        (target / "val/notes.txt").write_text("mine")
        (target / "train/.shard-000009.tar.unfinished").write_bytes(b"cut")
    assert staged(target) != {}, "it is to be kept"
    with pytest.raises(KeyError), using_copy(target, keep=False):
        raise KeyError
    names = {path.name for path in target.rglob("*")}
    assert names == {"notes.txt", "val", ".stage.users"}
    assert sum(path.stat().st_size for path in target.glob(".stage.*")) == 0


@pytest.mark.parametrize("refused", ["other index", "other split", "no room"])
def test_using_copy_keeps_what_stage_refused(source, target, refused, monkeypatch):
    """Packed images of the user: a refusal changes nothing, and only what stage() copied may go."""
    shutil.copytree(source / "train", target / "train")
    if refused == "other index":
        (target / "train/index.json").write_text((target / "train/index.json").read_text() + " ")
    elif refused == "other split":
        sample_images.write(target, {"val/mine": b"x"})
    else:
        monkeypatch.setattr(stage_module.shutil, "disk_usage", lambda path: Usage(10**12, 0, 0))
    target.chmod(0o755)
    held = files_of(target / "train")
    with pytest.raises(DataError), using_copy(target, keep=False):
        stage(source, target)
    assert files_of(target / "train") == held
    assert target.stat().st_mode & 0o777 == 0o755


def test_using_copy_keeps_a_copy_by_other_means(source, target):
    shutil.copytree(source, target)
    held = files_of(target)
    for _ in range(2):
        with using_copy(target, keep=False):
            stage(source, target)
        assert held.items() <= files_of(target).items()


def test_using_copy_of_ranks_that_end_at_the_same_moment_is_removed(target, monkeypatch):
    other = ExitStack()
    other.enter_context(using_copy(target, keep=False))

    def end_other_meanwhile(file):
        if not (is_locked := try_lock(file)):
            other.close()
        return is_locked

    monkeypatch.setattr(stage_module, "try_lock", end_other_meanwhile)
    with using_copy(target, keep=False):
        sample_images.write(target, {"train/index.json": b"", "train/.staged": b""})
    assert not (target / "train").exists()


def test_using_copy_is_not_removed_while_another_process_stages(source, target):
    target.mkdir(parents=True)
    with open_folder(target) as lock, using_copy(target, keep=False):
        stage(source, target)
        assert try_lock(lock)
    assert staged(target) == staged(source)


def test_using_copy_of_a_folder_that_cannot_be_made_is_left_to_stage(tmp_path):
    (tmp_path / "file").touch()
    with using_copy(tmp_path / "file/below", keep=False):
        pass


def test_using_copy_leads_nowhere_else(source, target, tmp_path):
    stage(source, tmp_path / "other")
    target.mkdir(parents=True)
    (target / "train").symlink_to(tmp_path / "other/train")
    with using_copy(target, keep=False):
        pass
    assert staged(tmp_path / "other") == staged(source)
