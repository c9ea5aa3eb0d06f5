"""Points of a sweep, one after the other, on this machine or from it."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from types import FrameType
from typing import Any

from bigbatch.comm.rendezvous.environ import without_identity
from bigbatch.files import make_folder, open_anew, refuse_link
from bigbatch.launch.jobs.foreground import handling_stops, shell_code
from bigbatch.launch.sweep.folder import DONE, FAILED, MISSING, SweepFolder, change_state, read_summary, state_of
from bigbatch.launch.sweep.job_log import find_reason
from bigbatch.launch.sweep.jobs import point_command
from bigbatch.launch.sweep.plan import Sweep
from bigbatch.launch.sweep.points import Point
from bigbatch.launch.sweep.sessions import end_sessions, sessions_under
from bigbatch.trainer.run.folder import writing
from bigbatch.trainer.run.owner import require_free

GRACE_SECONDS = 30.0
"""After each request to end, the firmer one."""
LEAVE_SECONDS = 5.0
"""So long may what a launcher has started outlive it."""


class Interrupted(Exception):
    """A person stopped the sweep; the point that ran is missing again."""


def run_points(
    sweep: Sweep,
    points: Sequence[Point],
    folder: SweepFolder,
    *,
    on_end: Callable[[Point, dict[str, Any]], None],
    goes_on: bool = False,
) -> None:
    """Run all, whatever becomes of each. on_end gets each with its new state; goes_on: as for run_point.

    Raises: Interrupted; RunFolderError.
    """
    for point in points:
        on_end(point, run_point(sweep, point, folder, goes_on=goes_on))


def run_point(sweep: Sweep, point: Point, folder: SweepFolder, *, goes_on: bool = False) -> dict[str, Any]:
    """Run one from its beginning; return its new state. goes_on: from its checkpoint, where it was interrupted.

    Raises: Interrupted; RunFolderError.
    """
    number, argv = point.number, point_command(sweep, point, folder)
    if goes_on and state_of(folder, number) == MISSING:
        require_nobody(folder, number)
    else:
        start_over(folder, number)
    change_state(folder, number, state=MISSING, reason=None, exit_code=None, started=time.time(), command=argv)
    began = time.monotonic()
    code, ended_by = run_logged(argv, log=folder.log(number), seconds=60 * sweep.timeout_minutes)
    outcome = judge(folder, number, exit_code=code)
    if ended_by == "person":
        change_state(folder, number, state=MISSING)
        raise Interrupted
    if ended_by == "time":
        outcome = {"state": FAILED, "reason": f"took longer than {sweep.timeout_minutes:g} min, and was ended"}
    return change_state(folder, number, exit_code=code, seconds=time.monotonic() - began, **outcome)


def start_over(folder: SweepFolder, number: int) -> None:
    """Remove what an earlier try left, which would count as measured. Raises: RunFolderError."""
    require_nobody(folder, number)
    path = folder.run(number).path
    with writing(path):
        if path.exists():
            rmtree(path)


def require_nobody(folder: SweepFolder, number: int) -> None:
    """See that no earlier try trains still, as one whose sweep was killed: it would slow the next one, too.

    Raises: RunFolderError.
    """
    path = folder.run(number).path
    with writing(path):
        make_folder(path.parent, within=folder.path)
        refuse_link(path)
        if path.exists():
            require_free(path)


def judge(folder: SweepFolder, number: int, *, exit_code: int | None, log: Path | None = None) -> dict[str, Any]:
    """Return state and reason of a point whose job has ended."""
    if read_summary(folder, number) is not None and exit_code in (0, None):
        return {"state": DONE, "reason": None}
    return {"state": FAILED, "reason": find_reason(log or folder.log(number), exit_code=exit_code)}


def run_logged(argv: Sequence[str], *, log: Path, seconds: float) -> tuple[int, str]:
    """Return exit code, and what ended it: itself, time, or a person, whose second Ctrl-C is firmer than the first.

    log: gets all that it prints. Raises: RunFolderError.
    """
    with writing(log):
        file = open_anew(log)
    with file:
        process = subprocess.Popen(
            argv,
            env=without_identity(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    ended_by = "itself"

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal ended_by
        _signal(process, signal.SIGINT if ended_by == "itself" else signal.SIGTERM)
        ended_by = "person"

    with handling_stops(pass_on):
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            ended_by = "time"
            _end(process)
    return shell_code(process.returncode), ended_by


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask twice, as a person would; then end the launcher, and all that it has started."""
    sessions = sessions_under(process.pid)
    for _ in range(2):
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
            break
    else:
        # before the launcher ends: then nothing tells any more whose children its ranks were
        sessions |= sessions_under(process.pid)
        process.kill()
        process.wait()
    end_sessions(sessions, grace_seconds=LEAVE_SECONDS)


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)
