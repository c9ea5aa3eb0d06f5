"""File for the exit code of a job's rank 0, since mpirun exits with 0 after it lost a node's daemon."""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bigbatch.comm.rendezvous.environ import STOPPED_VARIABLE
from bigbatch.comm.rendezvous.exit_record import read_record
from bigbatch.errors import INTERRUPTED, LOST, tell
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.spec import JobSpec


def exit_path(folder: Path) -> Path:
    """Return a new path for rank 0's file; not created yet, so that a watcher which removes it can start before."""
    return folder / f".stopped-{secrets.token_hex(8)}"


@contextmanager
def exit_file(path: Path) -> Iterator[Path | None]:
    """Create the empty file, yield its path, and remove it at the end; yield None if its folder is not writable."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        yield None
        return
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def exit_file_variable(path: Path | None) -> tuple[tuple[str, str], ...]:
    """Return the variable that names the file for the ranks."""
    return () if path is None else ((STOPPED_VARIABLE, str(path)),)


def with_code_of_first_rank(
    ended: Ended, job: JobSpec, *, path: Path | None, heals: bool, has_lost_hosts: bool = False
) -> Ended:
    """Correct a job's end by rank 0's record, if mpirun exited with 0 or waited for a lost host, or the job heals.

    has_lost_hosts: an earlier start lost hosts; if mpirun then fails before rank 0 begins, another one was lost.

    Without a record (a script that never connected, or a host that does not see the file) mpirun's code counts; that of
    a job that heals in place is always 0, so the job counts as lost.
    """
    here = socket.gethostname()
    begins_here = not job.hosts or job.hosts[0][0] in ("localhost", "127.0.0.1", here, here.partition(".")[0])
    record = None if path is None or (ended.code and not ended.outlived_rank_0 and not heals) else read_record(path)
    if isinstance(record, int):
        return replace(ended, code=record)
    # mpirun's own codes: 1 after SIGTERM, others if it was asked while it started its daemons
    has_not_begun = begins_here and not job.is_python and path is not None and read_record(path) == ""
    if ended.code and (ended.was_terminated or (ended.was_asked and has_not_begun)):
        return replace(ended, code=INTERRUPTED)
    if ended.code and has_lost_hosts and has_not_begun:
        tell(f"mpirun ended with exit code {ended.code} before a rank began: another host was lost")
        return replace(ended, code=LOST)
    if record is None or not (record or (begins_here and not job.is_python)):
        if ended.code == 0 and not job.is_python:
            tell(
                "mpirun ended with exit code 0, but the first rank left no record: its host does not share this folder"
                f"{'. With run.heal=in_place, code 0 does not mean that the job is finished' if heals else ''}"
            )
        return replace(ended, code=ended.code or (INTERRUPTED if ended.was_asked else LOST)) if heals else ended
    if ended.was_asked:
        return replace(ended, code=INTERRUPTED)
    tell("mpirun ended before the job's first rank did: a node or its connection to mpirun was lost")
    return replace(ended, code=LOST)
