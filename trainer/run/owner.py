"""Who may write into a run folder: one job at a time, also where nodes share its file system and none can lock it.

An owner is a file .owner-N, and the highest N owns. Who finds the owner gone makes the file N + 1, which one process
alone can do: by a hard link, of whose success a file system over the network tells truly. A file goes only after a
higher one is there, so no number is ever given anew. An owner that lives touches its file; whether it does is judged
by the watcher's own clock, as hosts' clocks differ.
"""

import errno
import getpass
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from threading import Event, Thread

from bigbatch.boot import boot_id, start_ticks
from bigbatch.comm.rendezvous.environ import slurm_job, start_of_launcher
from bigbatch.errors import RunFolderError
from bigbatch.files import open_plain, parse_json, read_plain, write_new, write_whole
from bigbatch.trainer.run.folder import writing

BEAT_SECONDS = 3.0
PATIENCE_SECONDS = 10.0
"""How long a job waits for an owner that lives: it may be about to end, as after the loss of one of its ranks."""
STALE_SECONDS = 30.0
"""Without a beat for so long, an owner on another host is gone."""
LOOK_SECONDS = 0.5

PREFIX = ".owner-"


@dataclass(frozen=True)
class Claim:
    """Says who owns a run folder, or wants to."""

    user: str
    host: str
    pid: int
    born: str
    """When the process began, as its kernel counts: a number may be another process's later."""
    kernel: str
    """Where the number means something: the boot of a machine, and a namespace there; empty where nobody tells."""
    job: str
    """Job number of Slurm; empty outside of it."""
    restart: int
    """How often Slurm has put the job back into its queue."""
    folder: int = 0
    """The number of the run folder on its file system: a copy, made while it was owned, is nobody's."""
    has_ended: bool = False
    has_failed: bool = False
    start: str = ""
    """By what launcher, which knows its own by that; empty where it tells none."""

    def __post_init__(self) -> None:
        if odd := [each.name for each in fields(self) if type(getattr(self, each.name)) is not each.type]:
            raise TypeError(f"{odd[0]} is of another type")

    def text(self) -> bytes:
        """Return the content of its file."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def __str__(self) -> str:
        """Name it for a message."""
        job = f"Slurm job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} of {self.user} on {self.host}"


def own_claim() -> Claim:
    """Return this process's."""
    job, restart = slurm_job() or ("", 0)
    user, kernel = str(os.getuid()), ""
    with suppress(KeyError, OSError):  # a container has no entry for this number
        user = getpass.getuser()
    with suppress(OSError):
        if boot := boot_id():
            kernel = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return Claim(
        user=user,
        host=socket.gethostname(),
        pid=os.getpid(),
        born=str(start_ticks(os.getpid()) or ""),
        kernel=kernel,
        job=job,
        restart=restart,
        start=start_of_launcher(),
    )


class Owner:
    """Holds a run folder until release; take makes one."""

    def __init__(self, folder: Path, *, number: int, claim: Claim) -> None:
        self._folder, self._number, self._claim = folder, number, claim
        self._released = Event()
        self._beating = Thread(target=self._beat, name="owner of the run folder", daemon=True)
        self._beating.start()

    def require(self) -> None:
        """Raise RunFolderError where another job has taken the folder over: this one had stood still."""
        numbers = _numbers(self._folder)
        if numbers and numbers[-1] > self._number:
            other = _read(_path(self._folder, numbers[-1]))
            raise RunFolderError(
                f"{self._folder} was taken over by {other or 'another job'}, as this one had not answered for "
                f"{STALE_SECONDS:g} s: it writes nothing more there"
            )

    def release(self, *, has_failed: bool = False) -> None:
        """Let the next job have the folder. has_failed: this one's work is not done, and it was not asked to stop."""
        self._released.set()
        self._beating.join()
        path = _path(self._folder, self._number)
        with suppress(OSError):  # the folder may be gone, and a claim without an owner goes stale
            if path.exists():
                write_whole(path, replace(self._claim, has_ended=True, has_failed=has_failed).text())

    def _beat(self) -> None:
        path = _path(self._folder, self._number)
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):  # storage that does not answer now may at the next beat
                os.utime(path)


def take(folder: Path, claim: Claim) -> Owner:
    """Own a run folder, which is made if needed, once nobody else does.

    Raises: RunFolderError that names an owner who lives, after PATIENCE_SECONDS.
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
                # others came and went meanwhile, and took their files of this number along
                _path(folder, newest + 1).unlink(missing_ok=True)
            time.sleep(LOOK_SECONDS * int.from_bytes(os.urandom(1), "big") / 256)
        for number in _numbers(folder)[:-1]:
            _path(folder, number).unlink(missing_ok=True)
    return Owner(folder, number=newest + 1, claim=claim)


def require_free(folder: Path) -> None:
    """Return once no job owns a run folder that is there. Raises: RunFolderError, as take does; OSError."""
    claim = replace(own_claim(), folder=folder.stat().st_ino)
    newest = 0
    while (last := max(_numbers(folder), default=0)) != newest:
        _wait_until_gone(folder, newest := last, claim)


@contextmanager
def owning(folder: Path) -> Iterator[Owner]:
    """Own a run folder meanwhile, as take does."""
    owner = take(folder, own_claim())
    try:
        yield owner
    except BaseException:
        owner.release(has_failed=True)
        raise
    owner.release()


def has_failed(folder: Path, *, start: str) -> bool:
    """Tell whether the process that owns the folder for that start has failed: it says so, or this kernel knows.

    Of one elsewhere that says nothing, it is not known: storage may stand still, and its beats with it. One that has
    ended well leaves others of its job that may need their time; and what another job's owner does is not asked.
    """
    try:
        owner = _read(_path(folder, max(_numbers(folder), default=0)))
    except OSError:  # no folder yet, or storage that does not answer
        return False
    if owner is None or owner.start != start:
        return False
    if owner.has_ended:
        return owner.has_failed
    return _lives(owner, replace(own_claim(), folder=owner.folder)) is False


def _wait_until_gone(folder: Path, number: int, claim: Claim) -> None:
    """Return when the owner of that number has ended, or another one has come.

    Raises: RunFolderError where it lives.
    """
    path = _path(folder, number)
    started = moved = time.monotonic()
    beat, has_moved = _beat_of(path), False
    while max(_numbers(folder), default=0) == number:
        owner = _read(path)
        now, last = time.monotonic(), beat
        beat = _beat_of(path)
        if beat != last:
            moved, has_moved = now, True
        lives = None if owner is None else _lives(owner, claim)
        if lives is False or (lives is None and now - moved >= STALE_SECONDS):
            return
        if now - started >= PATIENCE_SECONDS and (lives or (has_moved and now - moved < 2 * BEAT_SECONDS)):
            cancel = f"bigbatch launch cancel {owner.job.split()[0]}" if owner and owner.job else "Ctrl-C or kill there"
            raise RunFolderError(
                f"{folder} belongs to {owner or 'another job'}, which runs: wait for its end, stop it ({cancel}), or "
                "choose another run.directory"
            )
        time.sleep(LOOK_SECONDS)


def _lives(owner: Claim, claim: Claim) -> bool | None:
    """Tell whether an owner lives; None where only its beats can tell."""
    if owner.has_ended or (owner.job and owner.job == claim.job and owner.restart < claim.restart):
        return False
    if owner.kernel and owner.kernel == claim.kernel:
        return owner.folder == claim.folder and str(start_ticks(owner.pid)) == owner.born
    return None


def _numbers(folder: Path) -> list[int]:
    """List the numbers of all claims, lowest first."""
    names = (name.removeprefix(PREFIX) for name in os.listdir(folder) if name.startswith(PREFIX))
    return sorted(int(name) for name in names if name.isdecimal())


def _path(folder: Path, number: int) -> Path:
    return folder / f"{PREFIX}{number}"


def _read(path: Path) -> Claim | None:
    """Return the claim of a file; None where it is gone, half written, or of another version."""
    try:
        return Claim(**parse_json(read_plain(path)))
    except (OSError, ValueError, TypeError):
        return None


def _beat_of(path: Path) -> int:
    """Return what each beat of an owner changes: of an open file, as NFS may know a name's state of a minute ago."""
    try:
        with open_plain(path) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _create(path: Path, text: bytes) -> bool:
    """Make a file that is not there; False where it is. Raises: OSError."""
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
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):  # no links here
            with suppress(FileExistsError):
                write_new(path, text)
                return True
            return False
        if aside.stat().st_nlink == 2:  # an answer that was lost on the way had us ask twice
            return True
        if error.errno != errno.EEXIST:
            raise
        return False
    finally:
        aside.unlink()
