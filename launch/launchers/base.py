"""Interface of a launcher: a Launcher object, named in registry.py or by an entry point of another package.

Each launcher turns a JobSpec into a command, script or manifest that a person can read, keep and edit. The commands
know only the facts and functions below. A launcher starts `job.num_ranks` times this Python with `job.python_words`,
with the environment and `job.variables`; it tells each rank its place by variables, such as those of torchrun.
"""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from bigbatch.launch.jobs.check import VisibleFiles
from bigbatch.launch.jobs.spec import JobSpec

FOREGROUND_QUEUE = "its job runs in the foreground of a terminal, where Ctrl-C stops it"
"""Queue of a launcher that runs jobs in the foreground."""


class StartJob(Protocol):
    """Starts a job here, or submits it to a queue."""

    def __call__(self, job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
        """Return the job's exit code, or 0 for a submitted job.

        environ: of this process, without the ranks' variables of an enclosing launcher. options: parsed command line,
        with the launcher's own options.
        Raises: LaunchOptionError if it does not support the job; SchedulerError if a queue refuses it.
        """


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Operations on submitted jobs. Each raises SchedulerError with the scheduler's message."""

    status: Callable[[Sequence[str], bool], None]
    """Prints the state of these jobs, of all jobs of this user if none is named; with true, as a list in JSON."""
    cancel: Callable[[Sequence[str], bool], None]
    """Asks these jobs to save a checkpoint and stop; with true, ends them at once."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Raises: ValueError if `refused` names no field of JobSpec, and so would refuse nothing."""

    default_ranks: str
    """Default number of ranks, in words."""
    environment_help: str
    """Variables of this shell that reach the ranks, in words; --env adds others."""
    example: str
    """Example of arguments after `bigbatch launch NAME`."""
    refused: Mapping[str, str]
    """Unsupported field of JobSpec -> alternative. If it is stated, the job is refused; `start` honours all others."""
    dry_run: Callable[[JobSpec, Mapping[str, str]], str]
    """Returns a job's command, script or manifest for --dry-run; the second argument is environ.

    Raises: LaunchOptionError for an unsupported job, so it also checks a job.
    """
    start: StartJob
    queue: Queue | str
    """A str: how to list and end its jobs with other commands."""
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    """Adds the launcher's own options, which `start` receives."""
    visible: VisibleFiles = "shared"
    """Files of the starting host that its jobs see."""
    site_table: str | None = None
    """Its table in site files; None: settings outside of tables."""
    count_ranks: Callable[[], int] = lambda: 1
    """Returns the default number of ranks of a node."""
    preflight: StartJob | None = None
    """Tests the nodes of a job for `bigbatch launch preflight`; None: it has no such test."""

    def __post_init__(self) -> None:
        if unknown := self.refused.keys() - {field.name for field in fields(JobSpec)}:
            raise ValueError(f"refused: JobSpec has no field {', '.join(sorted(unknown))}")


def command_line(argv: Sequence[str], variables: Sequence[tuple[str, str]] = ()) -> str:
    stated = [f"{name}={value}" for name, value in dict(variables).items()]
    return shlex.join([*(["env", *stated] if stated else []), *argv]) + "\n"
