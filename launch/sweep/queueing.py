"""Points of a sweep as arrays in Slurm's queue."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bigbatch.launch.command import slurm_job, submit_job
from bigbatch.launch.slurm import log_path
from bigbatch.launch.slurm_queue import SlurmError, run_slurm
from bigbatch.launch.sweep.folder import DONE, SUBMITTED, SweepFolder, change_state, read_state, read_summary
from bigbatch.launch.sweep.jobs import array_words, arrays
from bigbatch.launch.sweep.plan import Sweep
from bigbatch.launch.sweep.points import Point
from bigbatch.launch.sweep.running import judge, start_over
from bigbatch.trainer.errors import ConfigError

POLL_SECONDS = 5.0
SETTLE_SECONDS = 30.0
"""A summary may reach this host so much later than the end of the job, by a network file system."""


def submit_points(sweep: Sweep, points: Sequence[Point], folder: SweepFolder) -> None:
    """One array for each number of ranks. Raises: SlurmError with Slurm's words; those submitted stay so."""
    for same in arrays(points).values():
        for point in same:
            start_over(folder, point.number)
        words = array_words(sweep, same, folder)
        job = slurm_job(words)
        number, sbatch = submit_job(job)
        sbatch.wait()
        for point in same:
            log = Path(log_path(job, job_id=f"{number}_{point.number}"))
            change_state(
                folder,
                point.number,
                state=SUBMITTED,
                reason=None,
                exit_code=None,
                job=number,
                log=str(log.relative_to(folder.path)),
                started=time.time(),
                seconds=None,
                command=["bigbatch", "launch", *words],
            )


def wait_for_points(
    sweep: Sweep, points: Sequence[Point], folder: SweepFolder, *, on_end: Callable[[Point, dict[str, Any]], None]
) -> None:
    """Until none of them is in the queue. Raises: SlurmError."""
    left = {point.number: point for point in points}
    while left:
        waiting = queued(sorted({str(read_state(folder, number)["job"]) for number in left}))
        for number in [number for number in left if (read_state(folder, number)["job"], number) not in waiting]:
            on_end(left.pop(number), settle(folder, number))
        if left:
            time.sleep(POLL_SECONDS)


def settle(folder: SweepFolder, number: int) -> dict[str, Any]:
    """The new state of a point that has left the queue."""
    state = read_state(folder, number)
    deadline = time.monotonic() + SETTLE_SECONDS
    while read_summary(folder, number) is None and not _has_failed(folder, state) and time.monotonic() < deadline:
        time.sleep(0.5)
    outcome = judge(folder, number, exit_code=None, log=folder.path / state["log"])
    code = 0 if outcome["state"] == DONE else None
    return change_state(folder, number, exit_code=code, seconds=time.time() - state["started"], **outcome)


def _has_failed(folder: SweepFolder, state: Mapping[str, Any]) -> bool:
    """The job's own last line says so."""
    try:
        text = (folder.path / state["log"]).read_text(errors="replace")
    except OSError:
        return False
    return "ended with exit code" in text and "ended with exit code 0" not in text


def queued(jobs: Sequence[str]) -> set[tuple[str, int]]:
    """(job, task) of all that wait or run. Raises: SlurmError."""
    found = set()
    for job in jobs:
        try:
            lines = run_slurm(["squeue", "--noheader", "--array", "--format=%i", f"--jobs={job}"]).split()
        except SlurmError as error:
            if "Invalid job id" not in str(error):  # Slurm has forgotten a job that ended minutes ago
                raise
            continue
        for word in lines:
            number, _, task = word.partition("_")
            if not task.isdigit():
                raise ConfigError(f"squeue shows {word!r}, which is no job of an array")
            found.add((number, int(task)))
    return found
