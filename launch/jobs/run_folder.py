"""Facts about the run of a job's command, found before the job waits in a queue."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

from bigbatch.comm.rendezvous.exit_record import has_recorded_failure, read_record
from bigbatch.errors import ConfigError, LaunchOptionError
from bigbatch.launch.jobs.spec import INDEX, JobSpec
from bigbatch.paths import expand_path
from bigbatch.trainer.config.file import find_config, load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.trainer.folder.owner import has_failed, newest_number
from bigbatch.words import has_numbers

COMMANDS_ON_A_RUN = (("evaluate",), ("predict",), ("export",))
CHECKS_AFTER_FAILURE = 3
"""Number of checks in which the other ranks and their launcher may end after rank 0 has failed. Not a time: no check
happens while this process is stopped with its job."""
REPORT_LOSS_SECONDS = 30
"""Time for the ranks to name a lost rank after comm.timeout_seconds; then the launcher ends them."""
REPORTED = ("step", "epoch", "loss", "top1", "images_per_second")


def command_of_first_task(job: JobSpec) -> tuple[str, ...]:
    """Return the words of the command for the first job of an array."""
    first = re.findall(r"\d+", job.array or "0")[0]
    return tuple(word.replace(INDEX, first) for word in job.command)


def load_experiment(job: JobSpec) -> Config | None:
    """Load the config of `train`, as load_config does; None for other commands and for its help."""
    if job.is_python or job.command[:1] != ("train",) or {"-h", "--help"} & set(job.command):
        return None
    return load_config(command_of_first_task(job)[1:])


def run_argument(job: JobSpec) -> str | None:
    """Return the run folder of a command other than `train`; None without one. Raises: PathError."""
    words = command_of_first_task(job)
    is_named = not job.is_python and words[:1] in COMMANDS_ON_A_RUN and len(words) > 1 and not words[1].startswith("-")
    return expand_path(words[1]) if is_named else None


def require_experiment(job: JobSpec) -> None:
    """Check that the experiment of a command other than `train` exists. Raises: ConfigError."""
    words = command_of_first_task(job)
    is_of_another = bool(words) and words[0] != "train" and not job.is_python
    if is_of_another and (name := _stated(words, "--config")):
        find_config(name)


def tuned_script(job: JobSpec) -> str | None:
    """Return the script of `comm tune --ddp`; None for other commands. Raises: PathError."""
    words = command_of_first_task(job)
    stated = _stated(words, "--ddp") if words[:2] == ("comm", "tune") and not job.is_python else None
    return stated and expand_path(stated)


def find_run_folder(job: JobSpec) -> str | None:
    """Return the run folder of `train`; None for other commands.

    An image has its own bigbatch: this host's answer counts only if it is in the work folder, which both see.
    In an array it may contain {index}; the first job's experiment is checked.
    Raises: ConfigError for a wrong experiment, or one that could not resume after it was requeued.
    """
    if job.image is not None:
        with suppress(ConfigError):
            folder = find_run_folder(replace(job, image=None))
            return folder if folder and Path(folder).absolute().is_relative_to(Path.cwd()) else None
        return None
    config = load_experiment(job)
    if config is None:
        return None
    run = config.run
    if run.resume != "auto":
        raise ConfigError(
            f"--run.resume {run.resume}: a job that may restart must resume from its own checkpoints (auto): leave the "
            "option out; for a new run name another --run.directory"
        )
    if job.array is None:
        return run.directory
    stated = _stated(job.command, "--run.directory")
    if INDEX not in (stated or _stated(job.command, "--config") or ""):
        raise ConfigError(f"--run.directory {run.directory}: the array's jobs would share it; put {INDEX} in it")
    return stated and expand_path(stated)


def try_load_experiment(job: JobSpec) -> Config | None:
    """Load the config of `train`, also for an image; None for a wrong one, which is refused elsewhere."""
    with suppress(ConfigError):
        return load_experiment(job)
    return None


def heals_in_place(job: JobSpec) -> bool:
    """Return whether the ranks of `train` continue without one that is lost."""
    config = try_load_experiment(job)
    return config is not None and config.run.heal == "in_place"


def count_joins(job: JobSpec) -> int:
    """Return how often a lost rank of `train` may start again to join the others.

    0 if they cannot give it a state, or if the run may not restart (run.resume).
    """
    config = try_load_experiment(job)
    if config is None or config.run.heal != "in_place" or config.run.resume != "auto" or config.optimizer.sharded:
        return 0
    can_heal = config.comm.backend in ("auto", "tcp", "gloo", "nccl") and config.comm.buffers == "torch"
    return (job.restarts or 0) if can_heal and not config.compute.cuda_graph else 0


def has_begun(job: JobSpec) -> Callable[[], bool]:
    """Return a function that tells whether the ranks, which are about to start, have taken the run folder of `train`.

    By then all ranks have met; before, they would wait for a lost one. Always true for another command, and for
    several nodes, as this host may not see their folder; lost ranks that start again need it on each host.
    """
    config = try_load_experiment(job)
    if config is None or (job.spans_nodes and not count_joins(job)):
        return lambda: True
    folder = Path(config.run.directory)
    before = newest_number(folder)
    return lambda: newest_number(folder) != before


def exit_wait_seconds(timeout_seconds: float, *, heals: bool) -> float:
    """Return the time after the first rank's end at which the launcher ends the others.

    timeout_seconds: comm.timeout_seconds, for which a rank waits; to agree on a new group it may wait twice.
    """
    return timeout_seconds * (2 if heals else 1) + REPORT_LOSS_SECONDS


def refuse_healing(job: JobSpec, *, launcher: str) -> None:
    """Raise LaunchOptionError if the job heals in place, for a launcher that ends all ranks after one is lost."""
    if heals_in_place(job):
        raise LaunchOptionError(
            f"--run.heal in_place: {launcher} ends all ranks when one is lost: leave it out, or use bigbatch launch "
            "local, mpirun, slurm or k8s"
        )


def newest_checkpoint(folder: str | None) -> Path | None:
    """Return the name of a run's newest checkpoint; None without one."""
    return None if folder is None else max(RunDir(Path(folder)).checkpoints.glob("step-*"), default=None)


class FirstRankWatch:
    """Tells whether rank 0 of a start ended so long ago that all ranks must have ended; called once a second.

    A thread checks, so storage that does not answer does not block the caller.
    """

    def __init__(
        self, folder: str | None, *, launch_id: str, end_seconds: float | None = None, heals: bool = False
    ) -> None:
        """launch_id: the ranks' STOPPED_VARIABLE. folder: run folder of the training.

        end_seconds: time in which all ranks end after rank 0 has ended well; None if it is unknown. heals: whether the
        job heals in place: then, also after a failure of rank 0, it is the time in which another rank takes over.
        """
        self._folder, self._launch_id = folder, launch_id
        self._end_seconds, self._heals = end_seconds, heals
        self._max_checks = self._num_checks = 0.0
        self._thread: Thread | None = None

    def __call__(self) -> bool:
        has_ended = self._num_checks > self._max_checks
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._check, name="bigbatch-first-rank", daemon=True)
            self._thread.start()
        return has_ended

    def _check(self) -> None:
        record = Path(self._launch_id)
        is_failed = has_recorded_failure(record) or (
            self._folder is not None and has_failed(Path(self._folder), launch_id=self._launch_id)
        )
        has_ended = self._end_seconds is not None and isinstance(read_record(record), int)
        self._num_checks = self._num_checks + 1 if is_failed or has_ended else 0
        end_seconds = None if is_failed and not self._heals else self._end_seconds
        self._max_checks = CHECKS_AFTER_FAILURE if end_seconds is None else end_seconds


def newest_report(folder: Path) -> dict[str, float] | None:
    """Return the main figures of a run's newest report, or None without one."""
    reports = (record for record in read_records(RunDir(folder).metrics) if record["kind"] in ("train", "eval"))
    newest = deque(reports, maxlen=1)
    return {name: newest[0][name] for name in REPORTED if has_numbers(newest[0], name)} if newest else None


def _stated(words: Sequence[str], option: str) -> str | None:
    found = None
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if word == option:
            found = following
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found
