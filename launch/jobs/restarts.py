"""Restart a job that has lost a rank; it resumes from its newest checkpoint."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bigbatch.errors import CRASHED, INTERRUPTED, LOST, PIPE_CLOSED, REFUSED, ConfigError, tell
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.run_folder import find_run_folder, newest_checkpoint
from bigbatch.launch.jobs.spec import JobSpec

FIRST_SIGNAL = 129
"""Smallest exit code of a process that a signal ended."""
FINAL = (0, REFUSED, INTERRUPTED, PIPE_CLOSED)
"""Exit codes after which no job restarts."""


def may_restart(code: int, *, is_python: bool) -> bool:
    """Return whether a job that exited with this code can restart without a change by the user.

    The codes of a user's script are unknown, so any failure counts.
    """
    if code in FINAL:
        return False
    return is_python or code in (LOST, CRASHED) or code >= FIRST_SIGNAL


def describe_restarts(job: JobSpec, *, joins: int = 0) -> str:
    """Return a dry run's comment about restarts; empty if there are none.

    joins: how often a lost rank starts again alone, in each start of the job. Raises: as find_run_folder.
    """
    if not job.restarts:
        return ""
    single = f"# a lost rank starts again, to join the others, up to {joins} time(s) in each start of the job\n"
    if job.spans_nodes:  # each node's launcher restarts single ranks only
        return single
    limit = "in all" if find_run_folder(job) is None else "in a row without a newer checkpoint"
    what = "a failure that ends all ranks" if joins else "a lost rank"
    return f"{single if joins else ''}# after {what} all start again, up to {job.restarts} time(s) {limit}\n"


def run_with_restarts(
    start: Callable[[JobSpec], Ended], job: JobSpec, *, refit: Callable[[JobSpec], JobSpec] = lambda job: job
) -> Ended:
    """Start the job, restart it up to job.restarts times in a row without a newer checkpoint, and return its end.

    refit: returns the job on its remaining hosts. If one was lost, the job restarts after any exit code not in FINAL.
    Raises: errors of start and refit.
    """
    restarts = job.restarts or 0
    folder = find_run_folder(job) if restarts else None
    left, newest, fit = restarts, newest_checkpoint(folder), job
    while True:
        ended = start(fit)
        can_restart = may_restart(ended.code, is_python=job.is_python)
        # it saved and stopped, or did not handle signals yet
        if ended.for_restart and not ended.was_asked and (can_restart or ended.code == INTERRUPTED):
            fit = refit(job)
            tell(_describe_restart(fit, job, folder=folder, saved=newest_checkpoint(folder)))
            continue
        if ended.was_asked or ended.code in FINAL:
            return ended
        remaining = refit(job) if restarts else fit
        if not can_restart and set(fit.hosts) <= set(remaining.hosts):
            return ended
        saved = newest_checkpoint(folder)
        # after a damaged newest checkpoint was renamed, the one before it is not newer
        if saved and (newest is None or saved > newest):
            left, newest = restarts, saved
        if left == 0:
            if restarts:
                since = "" if folder is None else " that saved no newer checkpoint"
                tell(f"exit code {ended.code}: not restarted after {restarts} restart(s){since}")
            elif saved := _resumable_checkpoint(job):
                tell(f"exit code {ended.code}: the same command continues from {saved}; --restarts 3 does it for you")
            return ended
        left -= 1
        fit = remaining
        tell(f"exit code {ended.code}: {_describe_restart(fit, job, folder=folder, saved=saved)}")


def _resumable_checkpoint(job: JobSpec) -> Path | None:
    """Return the checkpoint from which the same command continues; None if there is none, or run.resume forbids it."""
    with suppress(ConfigError):
        return newest_checkpoint(find_run_folder(job))
    return None


def _describe_restart(fit: JobSpec, job: JobSpec, *, folder: str | None, saved: Path | None) -> str:
    ranks = "" if fit.num_ranks == job.num_ranks else f" with {fit.num_ranks} of {job.num_ranks} ranks"
    if folder is None:
        return f"restarting{ranks}"
    where = f"from {saved}" if saved else "from the beginning"
    return f"restarting{ranks}, {where}"
