"""What the commands ask of a launcher: a new one is a file beside this one, and a line in registry.py.

Queue systems differ in all but this: a JobSpec becomes a text that a person can read, keep and edit, and something
takes it. So a launcher is a few facts and functions, and none of the commands knows more of it than stands here.
"""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bigbatch.launch.jobs.check import Sees
from bigbatch.launch.jobs.spec import JobSpec

IN_A_TERMINAL = "its job is the command in your terminal: look there, and end it by Ctrl-C"
"""The queue of a launcher that runs a job in the foreground."""


class StartJob(Protocol):
    """A launcher starts a job here, or hands it to a queue."""

    def __call__(self, job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
        """Return the job's exit code, or 0 for one that waits in a queue.

        environ is that of this process; options are what the command line said, the launcher's own included.
        Raises: LaunchOptionError for what it cannot do; SchedulerError where a queue refuses the job.
        """


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Jobs that wait or run elsewhere can be asked this. Each raises SchedulerError in the scheduler's words."""

    status: Callable[[Sequence[str]], None]
    """Prints the state of these jobs; of all of this user where none is named."""
    cancel: Callable[[Sequence[str], bool], None]
    """Asks these jobs to save a checkpoint and stop; with true, ends them at once."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher is one way to start a job."""

    name: str
    help: str
    """What it does, in one line."""
    default_ranks: str
    """How many ranks there are where none are stated, in words."""
    passes: str
    """Which of this shell's variables reach the ranks, in words; --env adds others."""
    example: str
    """What a person types behind `bigbatch launch NAME`."""
    refused: Mapping[str, str]
    """Fields of JobSpec that it cannot honour, and what to do instead: one that is stated is refused, never dropped."""
    dry_run: Callable[[JobSpec, Mapping[str, str]], str]
    """Returns the command, script or manifest that a job becomes, for a person and for a shell; second is environ.

    Raises: LaunchOptionError for what it cannot do, so that it also checks a job.
    """
    start: StartJob
    queue: Queue | str
    """A str says in one line how to see and end its jobs instead."""
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    """Adds options beside those that all launchers share; `start` gets them back."""
    sees: Sees = "shared"
    """Which files of the host that starts them its jobs see."""
    site_table: str | None = None
    """Names the table of a site's files that speaks to it alone; None: what stands outside of tables."""
    count_ranks: Callable[[], int] = lambda: 1
    """Returns the ranks of a node where nothing is stated."""


def command_line(argv: Sequence[str], variables: Sequence[tuple[str, str]] = ()) -> str:
    """Return a line that a shell takes apart into these words again, with the variables that they get."""
    stated = [f"{name}={value}" for name, value in dict(variables).items()]
    return shlex.join([*(["env", *stated] if stated else []), *argv]) + "\n"
