"""Find, download and verify published tar archives, and read them member by member in bounded memory."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bigbatch.errors import DataError, StorageError, first_line, shortened
from bigbatch.files import open_plain, replacing
from bigbatch.trainer.datasets.show_progress import Report
from bigbatch.trainer.input import tar_headers
from bigbatch.trainer.input.formats import MAX_PIXELS, excess_bytes
from bigbatch.trainer.input.tar_headers import MAX_MEMBERS, Window

TIMEOUT_SECONDS = 60.0
"""Seconds without data from a server before a download fails."""

_DOWNLOAD_AGAIN = "download the archive again"


@dataclass(frozen=True)
class Archive:
    """A published archive; a fact of None was not published, and is not checked."""

    names: tuple[str, ...]
    """Its possible file names, the official one first."""
    num_bytes: int | None = None
    md5: str | None = None
    url: str | None = None


@dataclass(frozen=True)
class ArchiveMember:
    """A regular file in an archive; read it before the iterator yields the next one."""

    origin: str
    """Path of the archive, with those of nested archives, for messages."""
    path: PurePosixPath
    num_bytes: int
    window: Window
    offset: int
    """Offset of its data in the archive."""
    max_pixels: int = MAX_PIXELS
    """read() refuses more bytes than an image of so many pixels takes."""

    def __str__(self) -> str:
        return f"{self.origin}: {str(self.path)!r}"

    def read(self) -> bytes:
        """Return all bytes. Raises: DataError naming archive and member if it is too long, cut off or damaged."""
        if excess := excess_bytes(self.num_bytes, max_pixels=self.max_pixels):
            raise DataError(f"{self}: {excess}; it is refused: get another archive, or raise --max-megapixels")
        with _named_errors(str(self)):
            data = self.part(self.num_bytes, 0)
            if len(data) < self.num_bytes:
                raise EOFError(f"{len(data):,} of {self.num_bytes:,} bytes are there")
            return data

    def part(self, length: int, offset: int) -> bytes:
        """Return length bytes from offset on, or fewer at the member's end."""
        return self.window.at(self.offset + offset, max(0, min(length, self.num_bytes - offset)))


def find_archive(folder: Path, archive: Archive) -> Path:
    """Return the archive's path in folder. Raises: StorageError if it is missing or has another length."""
    with _named_errors(str(folder)):
        path = next((folder / name for name in archive.names if (folder / name).is_file()), None)
        found = path.stat().st_size if path else 0
    if path is None:
        raise StorageError(f"{folder}: holds no {' or '.join(archive.names)}; download it there, or correct --archives")
    # the length is known at once, while an MD5 sum of ImageNet takes minutes
    if archive.num_bytes not in (None, found):
        raise StorageError(f"{path}: has {found:,} of {archive.num_bytes:,} bytes; {_DOWNLOAD_AGAIN}")
    return path


def check_md5(path: Path, archive: Archive, *, on_progress: Report) -> None:
    """Verify the MD5 sum, if one is published. Raises: DataError if it differs."""
    if archive.md5 is None:
        return
    with _named_errors(str(path)), open_plain(path) as file:
        digest, total = hashlib.md5(usedforsecurity=False), path.stat().st_size
        while piece := file.read(1 << 22):
            digest.update(piece)
            on_progress(f"checking {path.name}", file.tell(), total)
    if digest.hexdigest() != archive.md5:
        raise DataError(f"{path}: has MD5 {digest.hexdigest()}, not the published {archive.md5}; {_DOWNLOAD_AGAIN}")


def download(folder: Path, archive: Archive, *, on_progress: Report) -> None:
    """Download an archive into folder, unless it is complete there; the file gets its name once its MD5 sum matches.

    Raises: StorageError naming the address, the file and the remedy.
    """
    # imported late: a training run that stages data imports this module, but downloads nothing
    from http.client import HTTPException
    from urllib.request import Request, urlopen

    path, url = folder / archive.names[0], str(archive.url)
    try:
        if path.is_file():
            with suppress(DataError):  # another file, or a part of this one, is replaced
                check_md5(path, archive, on_progress=on_progress)
                return
        folder.mkdir(parents=True, exist_ok=True)
        digest, done = hashlib.md5(usedforsecurity=False), 0
        request = Request(url, headers={"User-Agent": "bigbatch"})
        with replacing(path, mark=".part") as file, urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            total = response.length or 0  # servers need not state the length
            while piece := response.read(1 << 20):
                file.write(piece)
                digest.update(piece)
                done += len(piece)
                on_progress(f"downloading {path.name}", done, max(total, done))
            if done < total:
                raise OSError(f"the connection ended after {done:,} of {total:,} bytes")
            if digest.hexdigest() != archive.md5:
                raise OSError(f"the download has MD5 {digest.hexdigest()}, not {archive.md5}")
    except (OSError, HTTPException) as error:
        advice = "try again, or fetch it elsewhere and name its folder with --archives"
        raise StorageError(f"{url}: cannot be downloaded to {path} ({first_line(error)}); {advice}") from error


def read_members(
    archive: Path | ArchiveMember, *, max_members: int = MAX_MEMBERS, max_pixels: int = MAX_PIXELS
) -> Iterator[ArchiveMember]:
    """Yield the regular files of an archive, or of an archive in another one, in stored order.

    Raises: DataError naming archive and member for a name that leads out of the archive, a link, a device, a
    sparse file or a duplicate name; naming the archive if it is not a tar, cut off or damaged.
    """
    origin, seen = str(archive), set()
    with _named_errors(origin), _opened(archive) as window:
        for member in tar_headers.read_members(window, path=origin, max_members=max_members):
            # not by pathlib, which interns each part: Python 3.12 never frees interned text
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            # digests, since there may be millions of long names
            digest = hashlib.blake2b("/".join(parts).encode(), digest_size=16).digest()
            is_folder = member.name.endswith("/")
            if digest in seen and not is_folder:
                name = shortened(member.name)
                raise DataError(f"{origin}: member {name} occurs twice; the whole archive is refused: get another one")
            seen.add(digest)
            if not is_folder:
                path = PurePosixPath(member.name)
                yield ArchiveMember(origin, path, member.num_bytes, window, member.offset, max_pixels)


@contextmanager
def _opened(archive: Path | ArchiveMember) -> Iterator[Window]:
    """Open an archive; its name may state a wrong compression: ImageNet-V2's .tar.gz is a plain tar."""
    if isinstance(archive, ArchiveMember):
        yield Window(archive.part)
        return
    with open_plain(archive) as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        unpacked = gzip.GzipFile(fileobj=file) if is_gzip else file

        def read(length: int, offset: int) -> bytes:
            unpacked.seek(offset)
            return unpacked.read(length)

        yield Window(read)
        while is_gzip and unpacked.read(1 << 20):  # to the end, where gzip's checksum is verified
            pass


@contextmanager
def _named_errors(origin: str) -> Iterator[None]:
    """Add the archive to errors; system errors are not reported as damage, since a new download would not help."""
    try:
        yield
    except (EOFError, zlib.error, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            reason = f"cannot be read ({error.strerror}); check its permissions and disk"
            raise StorageError(f"{origin}: {reason}") from error
        raise DataError(f"{origin}: is cut off or damaged ({first_line(error)}); {_DOWNLOAD_AGAIN}") from error
