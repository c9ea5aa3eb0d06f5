"""Tar archives: what is hostile is refused, what is cut off is noticed, what is whole is read as tarfile reads it."""

import gzip
import hashlib
import io
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from archive_writer import HOSTILE, special, tar_of

from bigbatch.trainer.data import archives
from bigbatch.trainer.data.archives import Archive, check_md5, download, find_archive, read_members
from bigbatch.trainer.errors import DataError

FILES = {"a/one.JPEG": b"1" * 700, "a/two.JPEG": b"", "three.txt": b"3" * 512}


def read_all(path):
    return {str(member.path): member.read() for member in read_members(path)}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2"])
def test_files_are_read_whatever_the_compression_and_folders_passed_over(tmp_path, mode):
    path = tmp_path / "misnamed.tar.gz"
    path.write_bytes(tar_of({"a": special("a", tarfile.DIRTYPE), **FILES}, mode=mode))
    assert read_all(path) == FILES


def test_an_archive_within_an_archive_is_read_in_place(tmp_path):
    path = tmp_path / "outer.tar"
    path.write_bytes(tar_of({"x.tar": tar_of(FILES), "y.tar": tar_of({"b": b"2"})}))
    found = {str(outer.path): {str(i.path): i.read() for i in read_members(outer)} for outer in read_members(path)}
    assert found == {"x.tar": FILES, "y.tar": {"b": b"2"}}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_are_refused_in_one_line(tmp_path, case):
    files, complaint = HOSTILE[case]
    path = tmp_path / "archive.tar"
    path.write_bytes(tar_of({"good": b"1", **files}))
    with pytest.raises(DataError, match=complaint) as error:
        read_all(path)
    assert str(error.value).startswith(f"{path}: member ")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_cut_never_passes_for_the_whole(tmp_path, mode):
    path, whole = tmp_path / "archive.tar", tar_of(FILES, mode=mode)
    path.write_bytes(whole)
    assert read_all(path) == FILES
    # three headers, three blocks of data, the block that ends them: beyond, only zeros are lost
    end, step = (7 * 512, 64) if mode == "w" else (len(whole), 3)
    for num_bytes in range(0, end, step):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(DataError, match=r"archive\.tar.*download the archive again$") as error:
            read_all(path)
        assert "\n" not in str(error.value)


def test_no_tar_is_named(tmp_path):
    path = tmp_path / "archive.tar"
    path.write_bytes(b"<html>404 not found</html>" * 100)
    with pytest.raises(
        DataError, match=r"archive\.tar: is cut off, damaged or unreadable .* download the archive again"
    ):
        read_all(path)


def test_damage_within_compressed_data_is_named(tmp_path):
    path = tmp_path / "archive.tgz"
    data = bytearray(gzip.compress(tar_of({"x": bytes(range(256)) * 400})))
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"archive\.tgz"):
        read_all(path)


def test_a_damaged_header_in_an_inner_archive_is_not_taken_for_its_end(tmp_path):
    inner = bytearray(tar_of({"one": b"1" * 512, "two": b"2" * 512, "three": b"3" * 512}))
    inner[2 * 512 + 150] ^= 255  # the checksum in the header of "two"
    with tarfile.open(fileobj=io.BytesIO(inner)) as peer:
        assert peer.getnames() == ["one"]  # why this needs a check of our own
    path = tmp_path / "outer.tar"
    path.write_bytes(tar_of({"class.tar": bytes(inner)}))
    with pytest.raises(
        DataError, match=r"outer\.tar: 'class\.tar': is cut off, damaged .*no member and no end at byte 1,024"
    ):
        [list(read_members(member)) for member in read_members(path)]


def test_a_member_that_claims_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 699)
    path = tmp_path / "archive.tar"
    path.write_bytes(tar_of(FILES))
    with pytest.raises(DataError, match=r"archive\.tar: 'a/one\.JPEG': claims 700 bytes"):
        read_all(path)


def test_find_archive_takes_any_of_its_names_and_compares_the_length(tmp_path):
    with pytest.raises(DataError, match=r"holds no x\.tar or y\.tar; download it there"):
        find_archive(tmp_path, Archive(names=("x.tar", "y.tar")))
    (tmp_path / "y.tar").write_bytes(b"12345")
    assert find_archive(tmp_path, Archive(names=("x.tar", "y.tar"), num_bytes=5)) == tmp_path / "y.tar"
    with pytest.raises(DataError, match=r"y\.tar: has 5 of 1,234 bytes; download the archive again"):
        find_archive(tmp_path, Archive(names=("y.tar",), num_bytes=1234))


def test_md5_is_compared(tmp_path):
    path, data, seen = tmp_path / "x.tar", b"abc" * 3_000_000, []
    path.write_bytes(data)
    good = Archive(names=("x.tar",), md5=hashlib.md5(data).hexdigest())
    check_md5(path, good, on_progress=lambda *state: seen.append(state))
    assert seen == [("checking x.tar", done, 9_000_000) for done in (1 << 22, 2 << 22, 9_000_000)]
    bad = Archive(names=("x.tar",), md5="0" * 32)
    with pytest.raises(DataError, match=rf"x\.tar: has MD5 {good.md5}, not the published {bad.md5}; download"):
        check_md5(path, bad, on_progress=lambda *_: None)
    with pytest.raises(DataError, match="no MD5 sum was published; leave out --check-md5"):
        check_md5(path, Archive(names=("x.tar",)), on_progress=lambda *_: None)
    with pytest.raises(DataError, match="unreadable"):
        check_md5(tmp_path, good, on_progress=lambda *_: None)


@pytest.fixture
def server(tmp_path):
    """Serves the folder; gives (folder, archive called x.tgz with this content)."""
    folder = tmp_path / "server"
    folder.mkdir()
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        url = f"http://127.0.0.1:{http.server_port}/x.tgz"
        yield folder, Archive(names=("x.tgz",), md5=hashlib.md5(b"whole archive").hexdigest(), url=url)
        http.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_download_replaces_what_an_earlier_try_left(server, tmp_path):
    folder, archive = server
    (folder / "x.tgz").write_bytes(b"whole archive")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/x.tgz").write_bytes(b"whole")
    download(tmp_path / "here", archive)
    assert (tmp_path / "here/x.tgz").read_bytes() == b"whole archive"
    (folder / "x.tgz").unlink()
    download(tmp_path / "here", archive)  # lies there whole: nothing is asked of the server


@pytest.mark.parametrize("content", [b"another archive", None])
def test_a_failed_download_names_the_address_and_the_way_out(server, tmp_path, content):
    folder, archive = server
    if content is not None:
        (folder / "x.tgz").write_bytes(content)
    with pytest.raises(DataError, match=rf"^{archive.url}: cannot be downloaded .*--archives$"):
        download(tmp_path / "here", archive)
