"""Points of a sweep as arrays in Slurm's queue."""

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from bigbatch.errors import LaunchOptionError, SchedulerError, tell
from bigbatch.experiments.engine.engine import end_state, require_idle, start_over
from bigbatch.experiments.engine.folder import DONE, FAILED, PENDING, SUBMITTED, SweepFolder
from bigbatch.experiments.engine.jobs import array_job, array_words, arrays
from bigbatch.experiments.engine.plan import SweepPlan
from bigbatch.experiments.engine.points import Point
from bigbatch.files import make_folder, read_end
from bigbatch.launch.launchers.slurm import submit_job
from bigbatch.launch.launchers.slurm_queue import run_slurm
from bigbatch.launch.launchers.slurm_script import log_path
from bigbatch.tools.child import find_reason, has_failed
from bigbatch.trainer.folder.folder import writing

POLL_SECONDS = 5.0
SETTLE_SECONDS = 30.0
"""How much later than the job's end its summary may reach this host, over a network file system."""
PATIENCE_SECONDS = 600.0
"""How long to wait for Slurm's answer: its controller may restart, and jobs continue meanwhile."""


def submit_points(plan: SweepPlan, points: Sequence[Point], folder: SweepFolder) -> None:
    """Submit one array for each number of ranks; if Slurm refuses one, its points fail with Slurm's message.

    Each array has a unique name, recorded before it is submitted, by which find_submitted finds it.
    Raises: SchedulerError if Slurm does not answer at all; those submitted stay submitted.
    """
    with writing(folder.logs):
        make_folder(folder.logs, within=folder.path)
    require_idle(folder, [point.number for point in points])
    # all jobs of an array have the same number of nodes and tasks
    for same in arrays(points).values():
        name = f"{plan.name}-{secrets.token_hex(4)}"
        job, words = array_job(plan, same, folder, name=name), array_words(plan, same, folder, name=name)
        for point in same:
            start_over(folder, point.number)
            folder.write_config(point)
            command = ["bigbatch", "launch", *words]
            unknown = dict.fromkeys(("reason", "exit_code", "job", "seconds"))
            folder.change_state(point.number, state=SUBMITTED, job_name=name, command=command, **unknown)
        try:
            number, sbatch = submit_job(job)
        except SchedulerError as error:
            try:
                find_submitted(same, folder)  # perhaps only sbatch's answer was lost
            except SchedulerError:
                raise error from None
            for point in same:
                if folder.state_of(point.number) == PENDING:
                    folder.change_state(point.number, state=FAILED, reason=str(error))
            continue
        # without --wait sbatch ends right after it has printed the number
        sbatch.wait()
        for point in same:
            _note_job(folder, point.number, number=number, log=Path(log_path(job, job_id=f"{number}_{point.number}")))


def find_submitted(points: Sequence[Point], folder: SweepFolder) -> None:
    """Find the Slurm jobs of points whose submission ended before a job's number was recorded, or mark them pending.

    Raises: SchedulerError.
    """
    states = [folder.read_state(point.number) for point in points]
    names = {s["number"]: s["job_name"] for s in states if s["state"] == SUBMITTED and s["job"] is None}
    jobs: dict[str, str | None] = {}
    for name in set(names.values()):
        # Slurm forgets a job minutes after its end; its logs stay
        known = run_slurm(["squeue", "--me", "--noheader", "--states=all", "--format=%F", f"--name={name}"]).split()
        logs = (path.stem.removeprefix(f"{name}-").partition("_")[0] for path in folder.logs.glob(f"{name}-*_*.log"))
        jobs[name] = next(chain(known, logs), None)
    for point, name in names.items():
        if (job := jobs[name]) is None:
            folder.change_state(point, state=PENDING)
        else:
            _note_job(folder, point, number=job, log=folder.logs / f"{name}-{job}_{point}.log")


def _note_job(folder: SweepFolder, point: int, *, number: str, log: Path) -> None:
    folder.change_state(point, job=number, log=str(log.relative_to(folder.path)))


def wait_for_points(
    points: Sequence[Point], folder: SweepFolder, *, waits: bool, on_end: Callable[[Point, dict[str, Any]], None]
) -> None:
    """Wait until none of the points is in the queue, and the results of each have reached this host.

    With waits=False, wait only for results of those that have left it. Raises: SchedulerError if Slurm does not answer.
    """
    left = {point.number: point for point in points}
    gone: dict[int, float] = {}
    answered, is_told = time.monotonic(), False
    while left:
        jobs = {number: str(folder.read_state(number)["job"]) for number in left}
        now = time.monotonic()
        try:
            waiting = queued(set(jobs.values()))
        except SchedulerError as error:
            if now - answered >= PATIENCE_SECONDS:
                raise
            if not is_told:
                again = f", asking again for {PATIENCE_SECONDS / 60:.0f} min" if waits else ""
                tell(f"Slurm does not answer: {error}; jobs continue{again}")
            if not waits:
                return
            is_told = True
            time.sleep(POLL_SECONDS)
            continue
        answered, is_told = now, False
        for number, job in jobs.items():
            if (job, number) in waiting:
                continue
            # it has left the queue; its files may reach this host later
            is_late = now - gone.setdefault(number, now) >= SETTLE_SECONDS
            if is_late or folder.read_summary(number) is not None or has_failed(_log(folder, number)):
                on_end(left.pop(number), record_end(folder, number))
        # points that have left the queue are settled; the rest still waits or runs
        if not waits and all((jobs[number], number) in waiting for number in left):
            return
        if left:
            time.sleep(POLL_SECONDS)


def record_end(folder: SweepFolder, number: int) -> dict[str, Any]:
    ended = end_state(folder, number, exit_code=None, reason=lambda: find_reason(_log(folder, number), exit_code=None))
    return folder.change_state(number, exit_code=0 if ended["state"] == DONE else None, **ended)


def _log(folder: SweepFolder, number: int) -> str:
    with suppress(OSError):
        return read_end(folder.path / str(folder.read_state(number)["log"]))
    return ""


def queued(jobs: Collection[str]) -> set[tuple[str, int]]:
    """Return (job, task) of all tasks of these jobs that wait or run. Raises: SchedulerError."""
    found = set()
    # a query for one job fails if Slurm has forgotten it, minutes after its end
    for word in run_slurm(["squeue", "--me", "--noheader", "--array", "--format=%i"]).split():
        number, _, task = word.partition("_")
        if number not in jobs:
            continue
        if not task.isdigit():
            raise LaunchOptionError(f"squeue shows {word!r}, which is not a job of an array")
        found.add((number, int(task)))
    return found
