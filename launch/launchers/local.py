"""Ranks on this host alone, without MPI: by torchrun, with one word less to type."""

import argparse
from collections.abc import Mapping

from bigbatch.launch.jobs.foreground import run_in_foreground
from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.launch.jobs.spec import SCHEDULED, JobSpec, refuse
from bigbatch.launch.launchers.base import IN_A_TERMINAL, Launcher, command_line
from bigbatch.launch.launchers.torchrun import ASKS_TO_STOP, rank_argv

REFUSED = {
    **dict.fromkeys(SCHEDULED, "this host has no queue: use bigbatch launch slurm"),
    **dict.fromkeys(("image", "mounts", "container"), "start bigbatch launch local inside the container"),
    "modules": "load modules in the shell before",
    "preflight": "run bigbatch launch preflight before",
    "logs": "it prints what all ranks print: add > FILE",
    "hosts": "it starts ranks on this host only: use bigbatch launch mpirun",
    **dict.fromkeys(("num_nodes", "node_rank", "master"), "it starts ranks on this host only: use torchrun, or mpirun"),
}


def local_argv(job: JobSpec) -> list[str]:
    """Return the words that start all ranks; pure. Raises: LaunchOptionError for what one host cannot do."""
    refuse(job, launcher="local", refused=REFUSED)
    return rank_argv(job)


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    return command_line(local_argv(job), job.variables)


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    variables = {**environ, **dict(job.variables)}
    return run_in_foreground(local_argv(job), environ=variables, asks_to_stop=ASKS_TO_STOP).code


LAUNCHER = Launcher(
    name="local",
    help="start ranks on this host, without MPI",
    default_ranks="one per GPU, or 1",
    passes="all",
    example="-- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    queue=IN_A_TERMINAL,
    count_ranks=lambda: count_gpus() or 1,
)
