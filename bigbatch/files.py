"""The only module that writes files, whole or not at all and never through a link, and that reads those of others.

A run folder may come from elsewhere, with links in it. A new file replaces a link of its name, and make_folder refuses
a link in a folder's place. A file that is read has a size limit by its kind, since a sparse one may claim any size.
Architecture tests find modules that write or read files in another way.
"""

import errno
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

TEXT_BYTES = 1 << 20
"""Limit of what people write, such as a recipe or a host file; PyYAML may take half a minute and 400 MB for it."""
RECORD_BYTES = 1 << 24
"""Limit of one record of a program, such as a summary, or a line of metrics: as JSON it may take 430 MB of memory."""
IMAGE_BYTES = 1 << 28
"""Limit of an encoded image: a JPEG of the largest data.max_megapixels takes less."""
LIST_BYTES = 1 << 30
"""Limit of a list or an index of images: that of ImageNet-21k's 14 million images has some 900 MB."""
LINES_BYTES = 1 << 34
"""Limit of a file that is read by lines: ten million records of metrics."""
WEIGHTS_BYTES = 1 << 38
"""Limit of weights and checkpoints: 16 billion weights with two states of an optimizer in float32."""


@contextmanager
def replacing(path: Path, *, mark: str | None = None, suffix: str = "", sync: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces path in one step if the block ends well, and is removed if it does not.

    Until then path is unchanged, and the new file has a hidden name beside it, unique on all nodes and ending in
    suffix. With mark the name is always the same, for one writer under a lock: the next run overwrites what a killed
    one left. sync flushes the bytes first: after a power cut path is the old file or the new one. Raises: OSError.
    """
    aside = path.parent / f".{path.name}{mark or f'.{uuid.uuid4().hex}{suffix}'}"
    file = create_file(aside)
    try:
        with file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):  # this error says less than the first one
            aside.unlink()
        raise


def write_whole(path: Path, data: bytes, *, mark: str | None = None, sync: bool = False) -> None:
    """Replace a file in one step, like replacing. Raises: OSError."""
    with replacing(path, mark=mark, sync=sync) as file:
        file.write(data)


def make_folder(path: Path, *, within: Path) -> None:
    """Make a folder and its parents below within; only within, which the user named, may be a link.

    Raises: OSError, also if another of these folders is a link.
    """
    folder = within
    for name in path.relative_to(within).parts:
        folder /= name
        refuse_link(folder)
    path.mkdir(parents=True, exist_ok=True)


def refuse_link(path: Path) -> None:
    """Raise OSError if path is a link: nothing is written through links in a run folder."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path} is a link, and nothing is written through links in a folder: remove it")


def write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist. Raises: OSError, FileExistsError if it does."""
    with open(path, "xb") as file:
        file.write(data)


def create_file(path: Path) -> BinaryIO:
    """Open a new file, in place of an older file or link of its name. Raises: OSError."""
    try:
        return open(path, "xb")
    except FileExistsError:
        path.unlink()
        return open(path, "xb")


def open_to_append(path: Path) -> BinaryIO:
    """Open a plain file to append to it; make it if needed.

    Raises: OSError, also for a link, a file with a second name, and anything but a plain file.
    """
    refuse_link(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path} is not a regular file, or has a second name (a hard link): remove it")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "ab")


def open_sparse(path: Path) -> BinaryIO:
    """Open a file for writes at any offset; create it if it is missing. Follows no link. Raises: OSError."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b", buffering=0)


def is_stream(path: Path) -> bool:
    """Return whether a path of the user is a device, a pipe or an open file of a process, such as /dev/stdout."""
    parent = os.path.realpath(path.parent)
    if parent == "/dev" or re.fullmatch(r"/proc/\d+(/task/\d+)?/fd", parent):
        return True
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


@contextmanager
def replacing_named(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that the user named, like replacing; a stream is written directly. Raises: OSError."""
    with open(path, "wb") if is_stream(path) else replacing(path) as file:
        yield file


def require_nameable(path: Path) -> None:
    """Make the folder of a file that the user named, and check early that the file can be written.

    Raises: OSError that names it.
    """
    if is_stream(path):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_named(path: Path, data: bytes) -> None:
    """Write a file that the user named, like replacing_named. Raises: OSError."""
    with replacing_named(path) as file:
        file.write(data)


def open_named(path: Path) -> BinaryIO:
    """Open a file that the user named, to write over a longer time: a stream, or a new file. Raises: OSError."""
    return open(path, "wb") if is_stream(path) else create_file(path)


def flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mode_of_own(folder: Path) -> int | None:
    """Return a folder's permissions, such as 0o700; None if it is another user's, or a link. Raises: OSError."""
    facts = folder.lstat()
    is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return stat.S_IMODE(facts.st_mode) if is_own else None


def is_own_file(path: Path) -> bool:
    """Return whether path is a plain file of this user without a second name (a hard link). Raises: OSError."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_nlink == 1


_NOT_PLAIN = "it is not a regular file"


def open_plain(path: str | Path, *, most: int = sys.maxsize) -> BinaryIO:
    """Open a plain file to read; most: limit of its bytes, needed unless the caller reads it in parts of a fixed size.

    Raises: OSError, also for a larger file, and for a pipe, a socket or a device, which may never end.
    """
    return open(path, "rb", opener=lambda name, flags: open_plain_sized(name, flags, most=most)[0])


def open_plain_sized(name: str | Path, flags: int = os.O_CLOEXEC, *, most: int = sys.maxsize) -> tuple[int, int]:
    """Open a plain file, as open_plain does; return its descriptor and its size in bytes. Raises: OSError."""
    # O_NONBLOCK: opening a pipe without a writer would not return
    descriptor = os.open(name, flags | os.O_NONBLOCK)
    facts = os.fstat(descriptor)
    is_plain = stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)  # a read reports that path is a folder
    if not is_plain or facts.st_size > most:
        os.close(descriptor)
        raise TooLong(name, facts.st_size, most) if is_plain else OSError(errno.EINVAL, _NOT_PLAIN, str(name))
    return descriptor, facts.st_size


class TooLong(OSError):
    """A file, or one of its lines, is above its limit; its text leaves out the path, which messages state anyway."""

    def __init__(self, name: str | Path, num_bytes: int, most: int, *, what: str = "it") -> None:
        reason = f"{what} has {num_bytes:,} bytes and may have {most:,}: name another file, or make it again"
        super().__init__(errno.EFBIG, reason, str(name))

    def __str__(self) -> str:
        return str(self.strerror)


def read_plain(path: str | Path, *, most: int = RECORD_BYTES) -> bytes:
    """Read a plain file of at most that many bytes, as open_plain opens it. Raises: OSError.

    It takes four system calls: after each a thread waits for the interpreter lock, and up to 64 threads read images.
    """
    descriptor, size = open_plain_sized(path, most=most)
    try:
        data = os.read(descriptor, size + 1)
        # a network file system may hand over parts, and a file may have grown
        while len(data) != size and (more := os.read(descriptor, max(size - len(data), 1 << 16))):
            data += more
            if len(data) > most:
                raise TooLong(path, len(data), most)
        return data
    finally:
        os.close(descriptor)


def read_end(path: str | Path, *, start: int = 0) -> str:
    """Read a log from a byte on, but at most its last RECORD_BYTES, as text. Raises: OSError."""
    with open_plain(path) as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - RECORD_BYTES))
        return file.read(RECORD_BYTES).decode(errors="replace")


def read_lines(path: str | Path, *, start: int = 0) -> Iterator[bytes]:
    """Yield the lines of a plain file from a byte on. Raises: OSError, also for a line above RECORD_BYTES."""
    with open_plain(path, most=LINES_BYTES) as file:
        file.seek(start)
        while line := file.readline(RECORD_BYTES + 1):
            if len(line) > RECORD_BYTES:
                raise TooLong(path, len(line), RECORD_BYTES, what="one of its lines")
            yield line


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a plain file. Raises: OSError."""
    digest = hashlib.sha256()
    with open_plain(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def parse_json(text: str | bytes, **how: Any) -> Any:
    """Parse JSON from any source; how: keyword arguments of json.loads.

    Raises: ValueError, also for lists nested too deeply for Python.
    """
    try:
        return json.loads(text, **how)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON for other programs: numbers that are not finite, which JSON lacks, are null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), indent=indent)
