"""Tar archives as they were published: found, checked, and read member by member without a temporary copy."""

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO
from urllib.request import Request, urlopen

from bigbatch.errors import DataError, shortened
from bigbatch.files import replacing
from bigbatch.trainer.datasets.show_progress import Report
from bigbatch.trainer.datasets.tar_headers import BoundedTarInfo, read_headers

MAX_MEMBER_BYTES = 1 << 30
"""A header may claim any length; what is read into memory stays below this (the largest CIFAR file has 155 MB)."""

TIMEOUT_SECONDS = 60.0
"""How long a server may be silent before a download is given up."""

_MAX_TAR_BYTES = 1 << 50
_AGAIN = "download the archive again"


@dataclass(frozen=True)
class Archive:
    """Describes a published archive; what is None was not published, and is not checked."""

    names: tuple[str, ...]
    """File names that it goes by, the official one first."""
    num_bytes: int | None = None
    md5: str | None = None
    url: str | None = None


@dataclass(frozen=True)
class Member:
    """Holds a regular file in an archive; read it before the next one is drawn."""

    origin: str
    """The archive, or the archives one in the other, for messages."""
    path: PurePosixPath
    num_bytes: int
    file: IO[bytes]

    def __str__(self) -> str:
        return f"{self.origin}: {str(self.path)!r}"

    def read(self) -> bytes:
        """Return all bytes. Raises: DataError naming archive and member if it is too long, cut off or damaged."""
        if self.num_bytes > MAX_MEMBER_BYTES:
            raise DataError(f"{self}: claims {self.num_bytes:,} bytes; it is refused: get another one")
        with _named_errors(str(self)):
            return self.file.read()


def find_archive(folder: Path, archive: Archive) -> Path:
    """Return where the archive lies in folder. Raises: DataError if it is missing or has another length."""
    with _named_errors(str(folder)):
        path = next((folder / name for name in archive.names if (folder / name).is_file()), None)
        found = path.stat().st_size if path else 0
    if path is None:
        raise DataError(f"{folder}: holds no {' or '.join(archive.names)}; download it there, or correct --archives")
    # length first: it is known at once, where an MD5 sum of ImageNet takes minutes
    if archive.num_bytes not in (None, found):
        raise DataError(f"{path}: has {found:,} of {archive.num_bytes:,} bytes; {_AGAIN}")
    return path


def check_md5(path: Path, archive: Archive, *, on_progress: Report) -> None:
    """Compare the MD5 sum with the published one. Raises: DataError if it differs, or none was published."""
    if archive.md5 is None:
        raise DataError(f"{path}: no MD5 sum was published; leave out --check-md5")
    with _named_errors(str(path)), open(path, "rb") as file:
        digest, total = hashlib.md5(usedforsecurity=False), path.stat().st_size
        while piece := file.read(1 << 22):
            digest.update(piece)
            on_progress(f"checking {path.name}", file.tell(), total)
    if digest.hexdigest() != archive.md5:
        raise DataError(f"{path}: has MD5 {digest.hexdigest()}, not the published {archive.md5}; {_AGAIN}")


def download(folder: Path, archive: Archive, *, on_progress: Report) -> None:
    """Bring an archive into folder, unless it lies there whole; it gets its name when its MD5 sum is right.

    Raises: DataError naming the address, the file and the way out.
    """
    path = folder / archive.names[0]
    try:
        if path.is_file():
            with suppress(DataError):  # if it is another file, or a part of it, it is replaced
                check_md5(path, archive, on_progress=on_progress)
                return
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path, mark=".part") as file:
            _fetch(archive, file, what=f"downloading {path.name}", on_progress=on_progress)
    except (OSError, HTTPException) as error:
        advice = "try again, or fetch it elsewhere and name its folder with --archives"
        raise DataError(f"{archive.url}: cannot be downloaded to {path} ({one_line(error)}); {advice}") from error


def _fetch(archive: Archive, file: BinaryIO, *, what: str, on_progress: Report) -> None:
    """Write what the server sends to file. Raises: OSError or HTTPException if not all came, or something else."""
    assert archive.url is not None
    digest, done = hashlib.md5(usedforsecurity=False), 0
    request = Request(archive.url, headers={"User-Agent": "bigbatch"})
    with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        total = response.length or 0  # a server need not say it
        while piece := response.read(1 << 20):
            file.write(piece)
            digest.update(piece)
            done += len(piece)
            on_progress(what, done, max(total, done))
    if done < total:
        raise OSError(f"the connection ended after {done:,} of {total:,} bytes")
    if digest.hexdigest() != archive.md5:
        raise OSError(f"what came has MD5 {digest.hexdigest()}, not {archive.md5}")


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text: tarfile and pickle write several."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(":")


def read_members(archive: Path | Member) -> Iterator[Member]:
    """Yield the regular files of an archive, or of one within another, in the order in which they lie.

    Raises: DataError naming archive and member for a name that leads out of the archive, a link, a device, a
    sparse file or a name that comes twice; naming the archive if it is no tar, cut off or damaged.
    """
    origin, seen = str(archive), set()
    with _named_errors(origin), _open(archive) as tar:
        for info in read_headers(tar):
            # not by pathlib, which interns each part: Python 3.12 keeps such a text for ever
            parts = [part for part in info.name.split("/") if part not in ("", ".")]
            # of millions of names, which may be long
            digest = hashlib.blake2b("/".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).digest()
            problem = "comes twice" if digest in seen and not info.isdir() else _problem(info, parts)
            if problem:
                name = shortened(info.name)
                raise DataError(f"{origin}: member {name} {problem}; it is refused whole: get another one")
            seen.add(digest)
            if info.isfile():
                file = tar.extractfile(info)
                assert file is not None
                yield Member(origin, PurePosixPath(info.name), info.size, file)
        _require_end(tar)


def _open(archive: Path | Member) -> tarfile.TarFile:
    """Open an archive, whose name does not tell its compression: ImageNet-V2's .tar.gz is a plain tar."""
    if isinstance(archive, Member):
        return tarfile.open(fileobj=archive.file, mode="r:", tarinfo=BoundedTarInfo)
    with open(archive, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return tarfile.open(archive, mode="r:gz" if is_gzip else "r:", tarinfo=BoundedTarInfo)


def _problem(info: tarfile.TarInfo, parts: Sequence[str]) -> str | None:
    """Return why a member must not be unpacked; None for a file or folder that stays inside."""
    reasons = {
        "has an absolute name": info.name.startswith("/"),
        "leads out of the archive": ".." in parts,
        "has an unprintable name": not info.name.isprintable(),  # a zero byte, a terminal's commands
        "has an impossible length": not 0 <= info.size < _MAX_TAR_BYTES,  # tarfile would seek there
        "is a symbolic link": info.issym(),
        "is a hard link": info.islnk(),
        "is a device or a pipe": info.isdev(),
        "is a sparse file": info.issparse(),
        "is no file": not (info.isfile() or info.isdir()),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _require_end(tar: tarfile.TarFile) -> None:
    """Refuse a cut or damaged header: tarfile takes it for the end, and a class would lack pictures unseen."""
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
    """Name the archive in errors; what the operating system refuses is no damage: to download again would not help."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{origin}: cannot be read ({error.strerror}); check its permissions and disk") from error
        raise DataError(f"{origin}: is cut off or damaged ({one_line(error)}); {_AGAIN}") from error
