"""Tar archives as they were published: found, checked, and read member by member without a temporary copy."""

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from bigbatch.trainer.errors import DataError

Report = Callable[[str, int, int], None]
"""(what is done, done so far, in all): called often, by the thread that asked for the work."""

MAX_MEMBER_BYTES = 1 << 30
"""A header may claim any length; what is read into memory stays below this (the largest CIFAR file has 155 MB)."""

_AGAIN = "download the archive again"


@dataclass(frozen=True)
class Archive:
    """A published archive; what is None was not published, and is not checked."""

    names: tuple[str, ...]
    """File names that it goes by, the official one first."""
    num_bytes: int | None = None
    md5: str | None = None
    url: str | None = None


@dataclass(frozen=True)
class Member:
    """A regular file in an archive; read it before the next one is drawn."""

    origin: str
    """The archive, or the archives one in the other, for messages."""
    path: PurePosixPath
    num_bytes: int
    file: IO[bytes]

    def __str__(self) -> str:
        return f"{self.origin}: {str(self.path)!r}"

    def read(self) -> bytes:
        """All bytes. Raises: DataError naming archive and member if it is too long, cut off or damaged."""
        if self.num_bytes > MAX_MEMBER_BYTES:
            raise DataError(f"{self}: claims {self.num_bytes:,} bytes; this is not the official archive")
        with _named_errors(str(self)):
            return self.file.read()


def find_archive(folder: Path, archive: Archive) -> Path:
    """Where the archive lies in folder. Raises: DataError if it is missing or has another length."""
    for name in archive.names:
        path = folder / name
        if path.is_file():
            break
    else:
        raise DataError(f"{folder}: holds no {' or '.join(archive.names)}; download it there, or correct --archives")
    found = path.stat().st_size
    if archive.num_bytes not in (None, found):
        raise DataError(f"{path}: has {found:,} of {archive.num_bytes:,} bytes; {_AGAIN}")
    return path


def check_md5(path: Path, archive: Archive, *, on_progress: Report) -> None:
    """Compare the MD5 sum with the published one. Raises: DataError if it differs, or none was published."""
    if archive.md5 is None:
        raise DataError(f"{path}: no MD5 sum was published; leave out --check-md5")
    digest, total = hashlib.md5(usedforsecurity=False), path.stat().st_size
    with _named_errors(str(path)), open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            on_progress(f"checking {path.name}", file.tell(), total)
    if digest.hexdigest() != archive.md5:
        raise DataError(f"{path}: has MD5 {digest.hexdigest()}, not the published {archive.md5}; {_AGAIN}")


def download(folder: Path, archive: Archive) -> None:
    """Bring an archive into folder, unless it lies there whole; a part of an earlier try is replaced.

    Raises: DataError naming the address.
    """
    from torchvision.datasets.utils import download_url

    assert archive.url is not None
    try:
        download_url(archive.url, str(folder), archive.names[0], archive.md5)
    except (OSError, RuntimeError) as error:
        advice = "fetch it elsewhere and name its folder with --archives"
        raise DataError(f"{archive.url}: cannot be downloaded ({one_line(error)}); {advice}") from error


def one_line(error: BaseException) -> str:
    """The first line of an error's text: tarfile and pickle write several."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(":")


def read_members(archive: Path | Member) -> Iterator[Member]:
    """Yield the regular files of an archive, or of one within another, in the order in which they lie.

    Raises: DataError naming archive and member for a name that leads out of the archive, a link, a device, a
    sparse file or a name that comes twice; naming the archive if it is no tar, cut off or damaged.
    """
    origin, seen = str(archive), set()
    with _named_errors(origin), _open(archive) as tar:
        for info in tar:
            path = PurePosixPath(info.name)
            problem = "comes twice" if path in seen and not info.isdir() else _problem(info)
            if problem:
                raise DataError(f"{origin}: member {info.name!r} {problem}; this is not the official archive")
            seen.add(path)
            if info.isfile():
                file = tar.extractfile(info)
                assert file is not None
                yield Member(origin, path, info.size, file)
        _require_end(tar)


def _open(archive: Path | Member) -> tarfile.TarFile:
    # compression is found out, not told by the name: ImageNet-V2's .tar.gz is a plain tar
    return tarfile.open(archive) if isinstance(archive, Path) else tarfile.open(fileobj=archive.file, mode="r:")


def _problem(info: tarfile.TarInfo) -> str | None:
    """Why a member must not be unpacked; None for a file or folder that stays inside."""
    path = PurePosixPath(info.name)
    reasons = {
        "has an absolute name": path.is_absolute(),
        "leads out of the archive": ".." in path.parts,
        "has an unprintable name": not info.name.isprintable(),  # a zero byte, a terminal's commands
        "is a symbolic link": info.issym(),
        "is a hard link": info.islnk(),
        "is a device or a pipe": info.isdev(),
        "is a sparse file": info.issparse(),
        "is no file": not (info.isfile() or info.isdir()),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _require_end(tar: tarfile.TarFile) -> None:
    """tarfile takes a cut or damaged header for the end, and a class would lack pictures unseen."""
    assert tar.fileobj is not None
    if isinstance(tar.fileobj, gzip.GzipFile):
        while tar.fileobj.read(1 << 20):  # up to the checksum of all; to seek back would unpack all again
            pass
        return
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"no member and no end at byte {tar.offset:,}")


@contextmanager
def _named_errors(origin: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{origin}: is cut off, damaged or unreadable ({one_line(error)}); {_AGAIN}") from error
