"""The one place where files are written: whole or not at all, and through no link. And JSON of them.

A run folder may come from elsewhere, with links in it. A new file replaces a link under its name, and make_folder
refuses a link in a folder's place. An architecture test finds modules that open files to write in another way.
"""

import ctypes
import errno
import json
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing(path: Path, *, mark: str | None = None, suffix: str = "", sync: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces path in one step when the block ends well, and goes when it does not.

    Until then path stays as it was, and file.name is the hidden name beside it. That is of this writer alone, on any
    node, unless a fixed mark ends it: where a lock leaves one writer, the next run then writes over what a killed one
    left. suffix ends the name where there is no mark. sync brings the bytes to the disk before the step, so that
    a power cut leaves the old file or the new one. Raises: OSError.
    """
    aside = path.with_name(f".{path.name}{mark or f'.{uuid.uuid4().hex}{suffix}'}")
    file = open_anew(aside)
    try:
        with file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):  # it tells less than what failed
            aside.unlink()
        raise


def write_whole(path: Path, data: bytes, *, mark: str | None = None, sync: bool = False) -> None:
    """Replace a file in one step, as replacing does. Raises: OSError."""
    with replacing(path, mark=mark, sync=sync) as file:
        file.write(data)


def make_folder(path: Path, *, within: Path) -> None:
    """Make a folder, and those between it and within, which the user named and which alone may be a link.

    Raises: OSError, also if one of the others is a link.
    """
    folder = within
    for name in path.relative_to(within).parts:
        folder /= name
        refuse_link(folder)
    path.mkdir(parents=True, exist_ok=True)


def refuse_link(path: Path) -> None:
    """Raise OSError if path is a link: in a run folder none is followed to write."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path} is a link, and nothing is written through links in a folder: remove it")


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there. Raises: OSError, FileExistsError if it is."""
    with open(path, "xb") as file:
        file.write(data)


def open_anew(path: Path) -> BinaryIO:
    """Open a new file, in the place of an older file or of a link that waits under its name. Raises: OSError."""
    try:
        return open(path, "xb")
    except FileExistsError:
        path.unlink()
        return open(path, "xb")


def open_to_append(path: Path) -> BinaryIO:
    """Open a plain file to write at its end, made if needed.

    Raises: OSError, also for a link, a file with a second name, and what is no plain file.
    """
    refuse_link(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path} is no plain file, or has a second name (a hard link): remove it")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "ab")


def is_stream(path: Path) -> bool:
    """Tell whether a path that the user named is a device, a pipe or an open file of a process, such as /dev/stdout."""
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
    """Yield the file that a user named: as of replacing; a stream is written as it is. Raises: OSError."""
    with open(path, "wb") if is_stream(path) else replacing(path) as file:
        yield file


def require_nameable(path: Path) -> None:
    """Make the folder of a file that the user named, and find out before anything takes long whether it can be written.

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
    """Write a file that the user named, as replacing_named does. Raises: OSError."""
    with replacing_named(path) as file:
        file.write(data)


def open_named(path: Path) -> BinaryIO:
    """Open a file that a user named, to write over a longer time: a stream as it is, else anew. Raises: OSError."""
    return open(path, "wb") if is_stream(path) else open_anew(path)


AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux's headers: paths relative to the working directory, and exchange both names."""


def exchange(one: Path, other: Path) -> bool:
    """Let two files or folders change names in one step; False, and nothing done, where that cannot be.

    NFS, for one, cannot. Raises: OSError.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:  # an older C library, or not Linux
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def flush(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MOST_OWN_BYTES = 1 << 24
"""A longer file is none that we wrote for ourselves."""


def mode_of_own(folder: Path) -> int | None:
    """Return who may do what in a folder, as 0o700; None where it is another user's, or a link. Raises: OSError."""
    facts = folder.lstat()
    is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return stat.S_IMODE(facts.st_mode) if is_own else None


def write_own(path: Path, data: bytes) -> None:
    """Replace a file in one step, readable by its user alone, as is its folder, which is made if needed.

    Raises: OSError, also where the folder belongs to another user or is a link.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = mode_of_own(path.parent)
    if mode is None:
        raise PermissionError(errno.EPERM, f"{path.parent} is no folder of this user's own")
    if mode != 0o700:
        path.parent.chmod(0o700)
    with replacing(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)


def open_plain(path: str | Path, *, buffering: int = -1) -> BinaryIO:
    """Open a plain file to read. Raises: OSError, also for a pipe, a socket or a device, which may never end."""
    return open(path, "rb", buffering, opener=_open_plain)


def _open_plain(name: str, flags: int) -> int:
    # O_NONBLOCK: a pipe that nobody writes to would never open
    descriptor = os.open(name, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open() itself says that it is a folder
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file")
    return descriptor


def read_plain(path: str | Path) -> bytes:
    """Read a plain file, as open_plain opens it. Raises: OSError."""
    with open_plain(path, buffering=0) as file:
        return file.read()


def read_own(path: Path) -> bytes:
    """Read a file of this user's own. Raises: OSError, also for another user's, a link, and what is no such file."""
    # O_NONBLOCK: a pipe in its place would never open
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_OWN_BYTES:
            raise OSError(errno.EINVAL, "it is no plain file, or too long")
        return file.read(MOST_OWN_BYTES)


def parse_json(text: str | bytes, **how: Any) -> Any:
    """Parse JSON that somebody else may have written; how: as json.loads takes it.

    Raises: ValueError, also for lists in lists that are too deep for Python.
    """
    try:
        return json.loads(text, **how)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
