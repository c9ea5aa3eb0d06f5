"""Ownership of a run folder: one job at a time writes to it, also on network file systems without locks.

A claim is a file .owner-N; the highest N owns the folder. A job that finds the owner gone creates .owner-(N + 1) by a
hard link, which succeeds for one process only, also over a network. A file is deleted only after a higher one exists,
so no number is used twice. A live owner touches its file periodically (its heartbeat); other jobs measure the time
between two heartbeats by their own clock, because clocks of hosts differ.
"""

import errno
import getpass
import json
import os
import socket
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from threading import Event, Thread

from bigbatch.boot import own_kernel, start_ticks
from bigbatch.comm.rendezvous.environ import read_launch_id, slurm_job
from bigbatch.errors import RunFolderError
from bigbatch.files import open_plain, parse_json, read_plain, write_new, write_whole
from bigbatch.trainer.folder.folder import writing

BEAT_SECONDS = 3.0
PATIENCE_SECONDS = 10.0
"""Time that a job waits for a live owner, which may be about to end, for example after it lost a rank."""
STALE_SECONDS = 30.0
"""An owner on another host counts as gone after so long without a heartbeat."""
LOOK_SECONDS = 0.5

PREFIX = ".owner-"


@dataclass(frozen=True)
class Claim:
    """The process that owns, or claims, a run folder."""

    user: str
    host: str
    pid: int
    born: str
    """Start time of the process in its kernel's ticks: process numbers are reused."""
    kernel: str
    """Boot and PID namespace in which the process number is valid; empty if unknown."""
    job: str
    """Slurm's job number; empty outside of Slurm."""
    restart: int
    """Slurm's restart count of the job."""
    folder: int = 0
    """Inode of the run folder: a copy of an owned folder has no owner."""
    has_ended: bool = False
    has_failed: bool = False
    launch_id: str = ""
    """Identifier of the launch, if the launcher sets one; else empty."""
    is_confirmed: bool = False
    """Whether all ranks of the job know this owner."""
    store: str = ""
    """Address and port of the job's store, which ranks that join look for here; empty for one process."""

    def __post_init__(self) -> None:
        if odd := [each.name for each in fields(self) if type(getattr(self, each.name)) is not each.type]:
            raise TypeError(f"{odd[0]} is of another type")

    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    def __str__(self) -> str:
        job = f"Slurm job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} of {self.user} on {self.host}"


def own_claim(*, store: tuple[str, int] | None = None) -> Claim:
    """Return the claim of this process. store: address of its job's store."""
    job, restart = slurm_job() or ("", 0)
    user = str(os.getuid())
    with suppress(KeyError, OSError):  # a container may have no entry for this number
        user = getpass.getuser()
    return Claim(
        user=user,
        host=socket.gethostname(),
        pid=os.getpid(),
        born=str(start_ticks(os.getpid()) or ""),
        kernel=own_kernel(),
        job=job,
        restart=restart,
        launch_id=read_launch_id(),
        store=f"{store[0]} {store[1]}" if store else "",
    )


class Owner:
    """Ownership of a run folder until release(); created by take() or take_over()."""

    def __init__(self, folder: Path, *, number: int, claim: Claim) -> None:
        self._folder, self.number, self._claim = folder, number, claim
        self._released = Event()
        self._beating = Thread(target=self._write_heartbeats, name="owner of the run folder", daemon=True)
        self._beating.start()

    def require_ownership(self) -> None:
        """Raise RunFolderError if another job has taken the folder while this process was suspended."""
        numbers = _numbers(self._folder)
        if numbers and numbers[-1] > self.number:
            other = _read(_path(self._folder, numbers[-1]))
            raise RunFolderError(
                f"{self._folder} now belongs to {other or 'another job'}: this job gave no heartbeat for "
                f"{STALE_SECONDS:g} s. This job stops and writes nothing more to the folder"
            )

    def confirm(self) -> None:
        """Record that all ranks of the job know this owner. Raises: RunFolderError as require_ownership()."""
        self.require_ownership()
        self._claim = replace(self._claim, is_confirmed=True)
        with writing(self._folder):
            write_whole(_path(self._folder, self.number), self._claim.text())

    def release(self, *, has_failed: bool = False) -> None:
        """Release the folder. has_failed: the run is not finished and was not asked to stop."""
        self._released.set()
        self._beating.join()
        path = _path(self._folder, self.number)
        with suppress(OSError):  # the folder may be gone; a claim without heartbeats expires
            if path.exists():
                write_whole(path, replace(self._claim, has_ended=True, has_failed=has_failed).text())

    def _write_heartbeats(self) -> None:
        path = _path(self._folder, self.number)
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):  # storage may answer again at the next heartbeat
                os.utime(path)


def take(folder: Path, claim: Claim) -> Owner:
    """Take ownership of a run folder, created if needed, when no other job owns it.

    Raises: RunFolderError naming a live owner after PATIENCE_SECONDS.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        claim = replace(claim, folder=folder.stat().st_ino)
        while True:
            newest = max(_numbers(folder), default=0)
            if newest:
                _wait_until_gone(folder, newest, claim)
            if _create(_path(folder, newest + 1), claim.text()):
                if _numbers(folder)[-1] == newest + 1:
                    break
                # other jobs claimed and released meanwhile, and deleted the file of this number
                _path(folder, newest + 1).unlink(missing_ok=True)
            time.sleep(LOOK_SECONDS * int.from_bytes(os.urandom(1), "big") / 256)
        for number in _numbers(folder)[:-1]:
            _path(folder, number).unlink(missing_ok=True)
    return Owner(folder, number=newest + 1, claim=claim)


def take_over(
    folder: Path, *, number: int, store: tuple[str, int] | None = None, lost: Collection[tuple[str, int, str]] = ()
) -> Owner:
    """Take the folder over from the owner of that number, a process of the same job.

    lost: kernel, pid and born of the job's lost processes. A lost process may itself have taken the folder over before
    it died. In that case, wait until its claim is known to be dead.
    Raises: RunFolderError if another process has taken it over already.
    """
    with writing(folder):
        claim = replace(own_claim(store=store), folder=folder.stat().st_ino)
        newest = max(_numbers(folder), default=0)
        owner = _read(_path(folder, newest))
        if owner and not owner.is_confirmed and (owner.kernel, owner.pid, owner.born) in lost:
            _wait_until_gone(folder, newest, claim)
            number = newest
        if not (newest == number and _create(_path(folder, number + 1), claim.text())):
            raise RunFolderError(
                f"{folder} has another owner than this job's former first rank: either other ranks of the job continue "
                "without this process, or the folder is on no disk that all nodes share"
            )
        _path(folder, number).unlink(missing_ok=True)
    return Owner(folder, number=number + 1, claim=claim)


def newest_claim(folder: Path) -> Claim | None:
    """Return the claim of the current or last owner; None if there is none, or it cannot be read."""
    with suppress(OSError):  # no folder yet, or storage does not answer
        return _read(_path(folder, max(_numbers(folder), default=0)))
    return None


def require_free(folder: Path) -> None:
    """Wait until no job owns an existing run folder. Raises: RunFolderError as take; OSError."""
    claim = replace(own_claim(), folder=folder.stat().st_ino)
    newest = 0
    while (last := max(_numbers(folder), default=0)) != newest:
        _wait_until_gone(folder, newest := last, claim)


def has_failed(folder: Path, *, launch_id: str) -> bool:
    """Return whether the owner of this launch has failed: its claim says so, or its process here has ended.

    False if it is unknown (an owner on another host whose claim states no end: storage may hang), if the owner ended
    without failure, or if it belongs to another job.
    """
    owner = newest_claim(folder)
    if owner is None or owner.launch_id != launch_id:
        return False
    if owner.has_ended:
        return owner.has_failed
    return _is_alive(owner, replace(own_claim(), folder=owner.folder)) is False


def _wait_until_gone(folder: Path, number: int, claim: Claim) -> None:
    """Wait until the owner of that number has ended or been replaced. Raises: RunFolderError if it lives."""
    path = _path(folder, number)
    started = moved = time.monotonic()
    beat, has_moved = _beat_of(path), False
    while max(_numbers(folder), default=0) == number:
        owner = _read(path)
        now, last = time.monotonic(), beat
        beat = _beat_of(path)
        if beat != last:
            moved, has_moved = now, True
        lives = None if owner is None else _is_alive(owner, claim)
        if lives is False or (lives is None and now - moved >= STALE_SECONDS):
            return
        if now - started >= PATIENCE_SECONDS and (lives or (has_moved and now - moved < 2 * BEAT_SECONDS)):
            cancel = f"bigbatch launch cancel {owner.job.split()[0]}" if owner and owner.job else "Ctrl-C or kill there"
            raise RunFolderError(
                f"{folder} belongs to {owner or 'another job'}, which runs: wait for its end, stop it ({cancel}), or "
                "choose another run.directory"
            )
        time.sleep(LOOK_SECONDS)


def _is_alive(owner: Claim, claim: Claim) -> bool | None:
    """Return whether an owner lives; None if only its heartbeats can show it."""
    if owner.has_ended or (owner.job and owner.job == claim.job and owner.restart < claim.restart):
        return False
    if owner.kernel and owner.kernel == claim.kernel:
        return owner.folder == claim.folder and str(start_ticks(owner.pid)) == owner.born
    return None


def newest_number(folder: Path) -> int:
    """Return the number of the folder's owner, which grows with each; 0 without one."""
    with suppress(OSError):  # no folder yet
        return max(_numbers(folder), default=0)
    return 0


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of all claims, lowest first."""
    names = (name.removeprefix(PREFIX) for name in os.listdir(folder) if name.startswith(PREFIX))
    return sorted(int(name) for name in names if name.isdecimal())


def _path(folder: Path, number: int) -> Path:
    return folder / f"{PREFIX}{number}"


def _read(path: Path) -> Claim | None:
    """Return the claim of a file; None if it is gone, incomplete, or of another version."""
    try:
        return Claim(**parse_json(read_plain(path)))
    except (OSError, ValueError, TypeError):
        return None


def _beat_of(path: Path) -> int:
    """Return the time of a file's last heartbeat. Opens the file, since NFS may cache a path's times for a minute."""
    try:
        with open_plain(path) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _create(path: Path, text: bytes) -> bool:
    """Create a file; return False if it exists. Raises: OSError."""
    aside = path.with_name(f".owner.{uuid.uuid4().hex}")
    try:
        write_new(aside, text)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
    try:
        os.link(aside, path)
        return True
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):  # no hard links here
            with suppress(FileExistsError):
                write_new(path, text)
                return True
            return False
        if aside.stat().st_nlink == 2:  # NFS may repeat a request whose answer was lost
            return True
        if error.errno != errno.EEXIST:
            raise
        return False
    finally:
        aside.unlink()
