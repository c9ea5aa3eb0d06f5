"""Owners of files that the users of a node share: a copy is trusted if only trusted users can change it."""

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from bigbatch.errors import ConfigError

WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def trusted_uids(names: Sequence[str]) -> frozenset[int]:
    """Return the IDs of this process's user and of the users with these names or numbers. Raises: ConfigError."""
    import pwd

    uids = {os.geteuid()}
    for name in names:
        try:
            uids.add(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise ConfigError(
                f"data.shared_by (--owner): this node has no user {name}: name one, or its number"
            ) from None
    return frozenset(uids)


def distrust(facts: os.stat_result, uids: Collection[int]) -> str | None:
    """Return why users other than uids may change a file or folder; None if they cannot.

    A folder with the sticky bit is safe: others may add names there, but not move or remove those of trusted users.
    """
    is_folder = stat.S_ISDIR(facts.st_mode)
    if not is_folder and not stat.S_ISREG(facts.st_mode):
        return "is neither a folder nor a regular file"
    if facts.st_uid not in uids:
        return f"belongs to another user ({user_name(facts.st_uid)})"
    if facts.st_mode & WRITABLE and not (is_folder and facts.st_mode & stat.S_ISVTX):
        return "can be changed by its group or by all users"
    return None


def distrusted(folder: Path, uids: Collection[int]) -> str | None:
    """Return the first path, of folder and its files, that others than uids may change, and why; None without one.

    Raises: OSError.
    """
    if reason := distrust(folder.lstat(), uids):
        return f"{folder}: {reason}"
    for path in sorted(folder.iterdir()):
        if reason := distrust(path.lstat(), uids):
            return f"{path}: {reason}"
    return None


def distrusted_above(target: Path, uids: Collection[int]) -> str | None:
    """Return the first folder above target in which others than uids and root may exchange it, and why; or None.

    Raises: OSError.
    """
    trusted = {0, *uids}
    for path in (*target.absolute().parents, *target.resolve().parents):
        if reason := distrust(path.stat(), trusted):
            return f"{path}: {reason}"
        if path.lstat().st_uid not in trusted:
            return f"{path}: is a link of another user"
    return None


def share_folder(folder: Path, uids: frozenset[int]) -> None:
    """Make a folder in which each user of this node keeps own files, or check one. Raises: OSError."""
    try:
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
    except FileExistsError:
        if reason := distrust(folder.stat(), uids | {0}):
            raise OSError(errno.EPERM, f"it {reason}") from None


def others_files(paths: Iterable[Path], uids: frozenset[int]) -> Iterator[BinaryIO]:
    """Open those files, each of one name, that only other users among uids may change; skip all others."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() and facts.st_nlink == 1 and not distrust(facts, uids):
            yield os.fdopen(descriptor, "rb", buffering=0)
        else:
            os.close(descriptor)


def user_name(uid: int) -> str:
    """Return a user's name, or the number if this node has no name for it."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
