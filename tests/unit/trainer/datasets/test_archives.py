"""Tar archives: what is hostile is refused, what is cut off is noticed, what is whole is read as tarfile reads it."""

import errno
import gzip
import hashlib
import os
import tarfile
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from archive_writer import HOSTILE, files_below, special, tar_of
from error_texts import naming

from bigbatch.errors import DataError
from bigbatch.trainer.datasets import archives
from bigbatch.trainer.datasets.archives import Archive, check_md5, download, find_archive, read_members

FILES = {"a/one.JPEG": b"1" * 700, "a/two.JPEG": b"", "three.txt": b"3" * 512}


def read_all(path):
    return {str(member.path): member.read() for member in read_members(path)}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_read_members_files_are_read_whatever_the_compression_and_folders_passed_over(tmp_path, mode):
    path = tmp_path / "misnamed.tar.gz"
    path.write_bytes(tar_of({"a": special("a", tarfile.DIRTYPE), **FILES}, mode=mode))
    assert read_all(path) == FILES


def with_flipped_middle(data):
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        tar_of(FILES, mode="w:bz2"),  # a compression that no data set uses
        tar_of(FILES, mode="w:xz")[:-20],
        b"<html>404 not found</html>" * 100,
        with_flipped_middle(gzip.compress(tar_of({"x": bytes(range(256)) * 400}))),
    ],
    ids=["bzip2", "xz, cut off", "html", "damage within compressed data"],
)
def test_read_members_what_is_no_whole_tar_is_named(tmp_path, data):
    path = tmp_path / "archive.tar"
    path.write_bytes(data)
    says = "compressed" if data.startswith((b"BZh", b"\xfd7z")) else "damaged"
    with pytest.raises(DataError, match=naming(path, says, "again")):
        read_all(path)


@pytest.mark.parametrize("case", HOSTILE)
def test_read_members_hostile_members_are_refused_in_one_line(tmp_path, case):
    files, parts = HOSTILE[case]
    path = tmp_path / "archive.tar"
    path.write_bytes(tar_of({"good": b"1", **files}))
    with pytest.raises(DataError, match=naming(path, *parts)) as error:
        read_all(path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_read_members_a_cut_never_passes_for_the_whole(tmp_path, mode):
    path, whole = tmp_path / "archive.tar", tar_of(FILES, mode=mode)
    path.write_bytes(whole)
    assert read_all(path) == FILES
    # three headers, three blocks of data, the block that ends them: beyond, only zeros are lost
    end, step = (7 * 512, 64) if mode == "w" else (len(whole), 3)
    for num_bytes in range(0, end, step):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(DataError, match=naming(path, "again")) as error:
            read_all(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [1 << 70, -(1 << 70)])
def test_read_members_an_impossible_length_of_a_name_is_refused(tmp_path, size):
    data = bytearray(tar_of({"n" * 120: b"1"}, tar_format=tarfile.GNU_FORMAT))
    data[124:136] = size.to_bytes(12, "big", signed=True) if size < 0 else b"\x80" + size.to_bytes(11, "big")
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    path = tmp_path / "archive.tar"
    path.write_bytes(data)
    with pytest.raises(DataError, match=naming(path, "cut off")):
        read_all(path)


def raw(info, tar_format=tarfile.GNU_FORMAT):
    """One header block, with nothing that tarfile would write before it."""
    return info.tobuf(tar_format)[-512:]


def extension(kind, data):
    """A header that says something about the member behind it."""
    info = special("././@LongLink", kind)
    info.size = len(data)
    return raw(info) + data + bytes(-len(data) % 512)


def pax(key, value):
    """One record of a pax header, which begins with its own length."""
    rest = b" %s=%s\n" % (key, value)
    return next(line for n in range(9) if len(line := b"%d%s" % (len(rest) + n, rest)) == len(rest) + n)


MEMBER = raw(tarfile.TarInfo("x"))
BIG = 24 << 20
SPARSE_MAP = b"%d\n" % BIG + b"0\n" * (BIG // 2)
BOMBS = {
    "long name": (extension(tarfile.GNUTYPE_LONGNAME, b"n" * BIG), "header claims 25,165,824 bytes"),
    "long link": (extension(tarfile.GNUTYPE_LONGLINK, b"n" * BIG), "header claims"),
    "pax": (extension(tarfile.XHDTYPE, pax(b"comment", b"n" * BIG)), "header claims"),
    "old pax": (extension(tarfile.SOLARIS_XHDTYPE, pax(b"comment", b"n" * BIG)), "header claims"),
    "global": (extension(tarfile.XGLTYPE, pax(b"comment", b"n" * BIG)), "header claims"),
    "many global": (b"".join(extension(tarfile.XGLTYPE, pax(b"k%d" % n, b"n" * 60_000)) for n in range(400)), 1),
    "headers of headers": (extension(tarfile.GNUTYPE_LONGNAME, b"n") * 2000, 1),
    "map of a sparse file": (
        extension(tarfile.XHDTYPE, pax(b"GNU.sparse.major", b"1") + pax(b"GNU.sparse.minor", b"0"))
        + extension(tarfile.REGTYPE, SPARSE_MAP),
        "sparse",
    ),
    "names": (
        b"".join(extension(tarfile.XHDTYPE, pax(b"path", b"%d" % n + b"n" * 60_000)) + MEMBER for n in range(300)),
        301,
    ),
}


@pytest.mark.parametrize("case", BOMBS)
def test_read_members_headers_do_not_fill_the_memory(tmp_path, case):
    headers, expected = BOMBS[case]
    path = tmp_path / "archive.tar"
    path.write_bytes(gzip.compress(headers + MEMBER + bytes(1024), 1))
    tracemalloc.start()
    try:
        if isinstance(expected, int):
            assert sum(1 for _ in read_members(path)) == expected
        else:
            with pytest.raises(DataError, match=naming(path, expected)) as error:
                read_all(path)
            assert "\n" not in str(error.value)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_read_members_a_size_in_a_header_of_its_own_counts_as_in_tarfile(tmp_path):
    path = tmp_path / "archive.tar"
    stated = extension(tarfile.XHDTYPE, pax(b"size", b"700"))
    path.write_bytes(stated + MEMBER + b"1" * 700 + bytes(324) + raw(tarfile.TarInfo("y")) + bytes(1024))
    with tarfile.open(path) as oracle:
        assert {member.name: member.size for member in oracle} == {"x": 700, "y": 0}
    assert read_all(path) == {"x": b"1" * 700, "y": b""}


def test_read_members_a_folder_that_states_a_size_has_no_bytes(tmp_path):
    folder = special("a", tarfile.DIRTYPE)
    folder.size = 700
    path = tmp_path / "archive.tar"
    path.write_bytes(raw(folder) + MEMBER + bytes(1024))
    assert read_all(path) == {"x": b""}


def refuse(number):
    def refusing(*_, **__):
        raise OSError(number, os.strerror(number))

    return refusing


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_read_members_what_the_system_refuses_is_no_damage(tmp_path, monkeypatch, number):
    archive = Archive(names=("x.tar",), md5="0" * 32)
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of(FILES))
    reason = (os.strerror(number), "permissions")
    with monkeypatch.context() as patch:
        patch.setattr(archives, "open_plain", refuse(number))
        with pytest.raises(DataError, match=naming(path, *reason)):
            read_all(path)
        with pytest.raises(DataError, match=naming(path, *reason)):
            check_md5(path, archive, on_progress=lambda *_: None)
    with monkeypatch.context() as patch:  # a folder that may not be entered
        patch.setattr(Path, "is_file", refuse(number))
        with pytest.raises(DataError, match=naming(f"{tmp_path}:", *reason)):
            find_archive(tmp_path, archive)
    member = next(read_members(path))
    with monkeypatch.context() as patch:
        patch.setattr(archives.Window, "at", refuse(number))
        with pytest.raises(DataError, match=naming(path, "'a/one.JPEG'", *reason)):
            member.read()


WHOLE = b"whole archive"


def md5_of(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def server(monkeypatch):
    """A server whose answer is set; gives (server, archive called x.tgz, which is WHOLE)."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(archives, "TIMEOUT_SECONDS", 0.2)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as http:
        http.answer, http.asked, http.is_over = answer_with(WHOLE), [], threading.Event()
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        url = f"http://127.0.0.1:{http.server_port}/x.tgz"
        yield http, Archive(names=("x.tgz",), md5=hashlib.md5(WHOLE).hexdigest(), url=url)
        http.is_over.set()
        http.shutdown()
        thread.join()


class Answering(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.headers["User-Agent"])
        self.server.answer(self)

    def log_message(self, *_):
        pass


def answer_with(content, *, status=200, claims=None, then_stall=False):
    """Send content, claiming its length or another; no claim at all where that is "nothing"."""

    def answer(handler):
        handler.send_response(status)
        if claims != "nothing":
            handler.send_header("Content-Length", str(len(content) if claims is None else claims))
        handler.end_headers()
        handler.wfile.write(content)
        if then_stall:
            handler.server.is_over.wait(20)

    return answer


def no_http(handler):
    handler.wfile.write(b"220 ready\r\n")


FAILURES = {
    "connection cut": (answer_with(b"whole", claims=13), ("5 of 13 bytes",)),
    "connection cut at once": (answer_with(b"", claims=13), ("0 of 13 bytes",)),
    "cut without a length": (answer_with(b"whole", claims="nothing"), (md5_of(b"whole"), md5_of(WHOLE))),
    "another archive": (answer_with(b"other archive"), (md5_of(b"other archive"), md5_of(WHOLE))),
    "not there": (answer_with(b"<html>", status=404), ("404",)),
    "stalled": (answer_with(b"whole", claims=13, then_stall=True), ("timed out",)),
    "no HTTP": (no_http, ("220 ready",)),
}


@pytest.mark.parametrize("left", [b"whole", b"other archive", b""])
def test_download_replaces_what_an_earlier_try_left_and_leaves_what_is_whole(server, tmp_path, left):
    http, archive = server
    (tmp_path / "x.tgz").write_bytes(left)
    (tmp_path / ".x.tgz.part").write_bytes(b"of a run that was killed, longer than the archive")
    download(tmp_path, archive, on_progress=lambda *_: None)
    assert files_below(tmp_path) == {"x.tgz": WHOLE}
    download(tmp_path, archive, on_progress=lambda *_: None)
    assert len(http.asked) == 1


@pytest.mark.parametrize("case", FAILURES)
def test_download_that_fails_is_one_line_with_a_way_out_and_leaves_nothing(server, tmp_path, case):
    http, archive = server
    http.answer, parts = FAILURES[case]
    with pytest.raises(DataError, match=naming(archive.url, tmp_path / "x.tgz", *parts, "--archives")) as error:
        download(tmp_path, archive, on_progress=lambda *_: None)
    assert "\n" not in str(error.value)
    assert files_below(tmp_path) == {}
    http.answer = answer_with(WHOLE)
    download(tmp_path, archive, on_progress=lambda *_: None)
    assert files_below(tmp_path) == {"x.tgz": WHOLE}
