"""Writing a file whole or not at all."""

import json
import math
import os
import socket
import stat
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch import files
from bigbatch.files import as_json, read_plain, replacing, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("mark", [None, ".part"])
def test_files_a_new_one_and_an_old_one_are_replaced(tmp_path: Path, mark: str | None, sync: bool) -> None:
    path = tmp_path / "a.json"
    for data in (b"first", b"second, longer", b""):
        write_whole(path, data, mark=mark, sync=sync)
        assert (path.read_bytes(), names(tmp_path)) == (data, ["a.json"])


def test_files_mode_is_that_of_a_plain_write(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_whole(tmp_path / "whole", b"")
    assert len({stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "whole")}) == 1


@pytest.mark.parametrize("error", [ValueError("ours"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_files_what_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["a"])


def test_files_bytes_are_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(f"{os.fstat(fd).st_size} synced"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("named"), replace(old, new)))
    write_whole(tmp_path / "a", b"123", sync=True)
    write_whole(tmp_path / "b", b"123")
    assert done == ["3 synced", "named", "named"]


def test_files_a_disk_that_is_full_at_the_end_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    write_whole(tmp_path / "a", b"123")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=naming(os.strerror(28))):
        write_whole(tmp_path / "a", b"new", sync=True)
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"123", ["a"])


def test_files_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path, suffix=".onnx") as first, replacing(path) as second:
        assert first.name.endswith(".onnx")
        first.write(b"first")
        second.write(b"second")
        assert first.name != second.name
    assert (path.read_bytes(), names(tmp_path)) == (b"first", ["a"])


@pytest.mark.parametrize("left", ["file", "link", "dangling link"])
def test_files_what_lies_under_a_fixed_mark_is_removed_and_no_link_is_followed(tmp_path: Path, left: str) -> None:
    path, aside, foreign = tmp_path / "a", tmp_path / ".a.part", tmp_path / "foreign"
    if left == "file":
        aside.write_bytes(b"of a killed run, and longer")
    else:
        aside.symlink_to(foreign)
    if left == "link":
        foreign.write_bytes(b"theirs")
    write_whole(path, b"ours", mark=".part")
    assert path.read_bytes() == b"ours"
    assert not path.is_symlink()
    assert not aside.is_symlink()
    assert (foreign.read_bytes() if foreign.exists() else None) == (b"theirs" if left == "link" else None)


def test_files_where_nothing_can_be_written_the_system_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no/a", b"")
    (tmp_path / "no").touch()
    with pytest.raises(NotADirectoryError):
        write_whole(tmp_path / "no/a", b"")
    (tmp_path / "folder/x").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"'\.'"):
        write_whole(Path(), b"")
    assert names(tmp_path) == ["folder", "no"]


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_files_plain_ones_alone_are_read(kind: str, tmp_path: Path) -> None:
    """A read of a pipe without writer would never return; a device may have no end."""
    path = tmp_path / "image.jpg"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        read_plain(str(path))
    path.unlink()
    path.write_bytes(b"an image")
    assert read_plain(str(path)) == b"an image"


def test_files_a_file_that_comes_in_parts_or_grows_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "image.jpg", os.read
    path.write_bytes(content := bytes(range(200)))
    monkeypatch.setattr(os, "read", lambda descriptor, length: read(descriptor, min(length, 70)))
    assert read_plain(path) == content

    def read_while_it_grows(descriptor: int, length: int) -> bytes:
        if path.stat().st_size == len(content):
            path.write_bytes(content * 2)
        return read(descriptor, length)

    monkeypatch.setattr(os, "read", read_while_it_grows)
    assert read_plain(path) == content * 2
    with pytest.raises(IsADirectoryError):
        read_plain(tmp_path)


def test_files_folders_are_made_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "named").symlink_to("elsewhere")  # by the user
    files.make_folder(tmp_path / "named/a/b", within=tmp_path / "named")
    assert (tmp_path / "elsewhere/a/b").is_dir()
    for target in (tmp_path / "elsewhere", tmp_path / "nothing"):
        link = tmp_path / "named/link"
        link.symlink_to(target)
        for path in (link, link / "c"):
            with pytest.raises(OSError, match=naming(link)):
                files.make_folder(path, within=tmp_path / "named")
        link.unlink()
    assert names(tmp_path / "elsewhere") == ["a"]
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("kind", ["link", "dangling link", "second name", "pipe"])
def test_files_are_extended_under_their_only_name(kind: str, tmp_path: Path) -> None:
    path, foreign = tmp_path / "a", tmp_path / "foreign"
    for _ in range(2):
        with files.open_to_append(path) as file:
            file.write(b"1")
    assert path.read_bytes() == b"11"
    path.unlink()
    if kind != "dangling link":
        foreign.write_bytes(b"theirs")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "second name":
        os.link(foreign, path)
    else:
        path.symlink_to(foreign)
    with pytest.raises(OSError, match=r"Errno"):
        files.open_to_append(path)
    assert (foreign.read_bytes() if foreign.exists() else b"theirs") == b"theirs"
    with files.create_file(path) as file:
        file.write(b"ours")
    assert path.read_bytes() == b"ours"
    assert (foreign.read_bytes() if foreign.exists() else b"theirs") == b"theirs"


def test_files_that_a_user_named_are_replaced_and_streams_are_not(tmp_path: Path) -> None:
    path, foreign = tmp_path / "a", tmp_path / "foreign"
    foreign.write_bytes(b"theirs")
    path.symlink_to(foreign)
    files.write_named(path, b"ours")
    assert (path.read_bytes(), foreign.read_bytes(), names(tmp_path)) == (b"ours", b"theirs", ["a", "foreign"])
    with path.open("wb") as out:
        stream = Path(f"/dev/fd/{out.fileno()}")
        assert files.is_stream(stream)
        files.write_named(stream, b"streamed")
    assert path.read_bytes() == b"streamed"
    for name in ("/dev/null", "/dev/stdout", f"/proc/{os.getpid()}/fd/1"):
        assert files.is_stream(Path(name))
    os.mkfifo(tmp_path / "pipe")
    assert files.is_stream(tmp_path / "pipe")
    assert not any(map(files.is_stream, (tmp_path, path, foreign, tmp_path / "new", tmp_path / "new/new")))
    with files.open_named(Path("/dev/null")) as nowhere:
        nowhere.write(b"x")
    with files.open_named(path) as file:
        file.write(b"again")
    assert path.read_bytes() == b"again"


def test_json_for_others_has_null_for_numbers_that_it_lacks() -> None:
    found = {"loss": [math.nan, -math.inf, 1e-300], "step": 2**60, 3: None}
    for indent in (None, 1):
        text = as_json(found, indent=indent)
        assert json.loads(text, parse_constant=pytest.fail) == {"loss": [None, None, 1e-300], "step": 2**60, "3": None}
        assert as_json({"loss": 1.5}, indent=indent) == json.dumps({"loss": 1.5}, indent=indent)
