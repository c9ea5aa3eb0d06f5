"""Ranks on this host alone, without MPI: by torchrun, with one word less to type."""

from functools import partial

from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.launch.jobs.spec import SCHEDULED, JobSpec, refuse
from bigbatch.launch.launchers.base import IN_A_TERMINAL, Launcher
from bigbatch.launch.launchers.torchrun import dry_run, rank_argv, start

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


LAUNCHER = Launcher(
    name="local",
    help="start ranks on this host, without MPI",
    default_ranks="one per GPU, or 1",
    passes="all",
    example="-- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=partial(dry_run, local_argv),
    start=partial(start, local_argv),
    queue=IN_A_TERMINAL,
    sees="all",
    count_ranks=lambda: count_gpus() or 1,
)
