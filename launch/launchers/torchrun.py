"""Launcher for torchrun: on one host, or this host's part of a job on several."""

import argparse
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bigbatch.interpreter import python_argv
from bigbatch.launch.jobs.foreground import run_in_foreground
from bigbatch.launch.jobs.run_folder import refuse_healing
from bigbatch.launch.jobs.spec import SCHEDULER_FIELDS, JobSpec, refuse
from bigbatch.launch.launchers.base import FOREGROUND_QUEUE, Launcher, command_line
from bigbatch.launch.launchers.local import one_thread_per_rank, rendezvous_of, with_own_secret
from bigbatch.orphans import ending_orphans

ASKS_TO_STOP = signal.SIGTERM
"""Signal that torchrun passes on before it waits 30 s for the ranks; SIGUSR1 would end torchrun without its ranks."""

AGENT = "bigbatch.launch.launchers.torchrun_agent"
"""The module that runs torchrun; it takes torchrun's arguments."""

REFUSED = {
    **dict.fromkeys(SCHEDULER_FIELDS, "torchrun has no queue: use bigbatch launch slurm, or run torchrun inside a job"),
    **dict.fromkeys(("image", "mounts", "container"), "start bigbatch launch torchrun inside the container"),
    "hosts": "torchrun starts ranks on its own host only: use mpirun, or --nodes and --node-rank on each host",
    "modules": "load modules in the shell before",
    "preflight": "run bigbatch launch preflight before",
    "logs": "torchrun prints what all ranks print: add > FILE",
}


def torchrun_argv(job: JobSpec, *, log_dir: str | None = None) -> list[str]:
    """Return torchrun's command line with one process per rank of this host; pure.

    It runs in this Python. On one host the agent chooses the port of the rendezvous; torchrun's --standalone would
    listen on all interfaces and unpickle data from any client. log_dir: for the ranks' error files; without it torchrun
    leaves a temporary folder.
    Raises: LaunchOptionError for unsupported options, a job that heals in place, and for several nodes without
    --node-rank and --master.
    """
    refuse(job, launcher="torchrun", refused=REFUSED)
    refuse_healing(job, launcher="torchrun")
    node_rank, (address, port) = rendezvous_of(job, port=0)
    return [
        *(*python_argv(), "-m", AGENT),
        *(f"--nnodes={job.num_nodes or 1}", f"--node-rank={node_rank}"),
        *(f"--master-addr={address}", f"--master-port={port}"),
        f"--nproc-per-node={job.ranks_per_node}",
        *([] if log_dir is None else [f"--log-dir={log_dir}"]),
        *([] if job.restarts is None else [f"--max-restarts={job.restarts}"]),
        *_kept(job.python_words),
    ]


def _kept(words: tuple[str, ...]) -> list[str]:
    """Return words from which torchrun passes on these: it removes a -- after script or module, so that is doubled."""
    name_at = 1 if words[0] == "-m" else 0
    twice = ("--",) if words[name_at + 1 : name_at + 2] == ("--",) else ()
    return [*words[: name_at + 1], *twice, *words[name_at + 1 :]]


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    return command_line(torchrun_argv(job), job.variables)


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    # as torchrun does itself, but without its warning
    variables = {**one_thread_per_rank(job), **with_own_secret(job, environ), **dict(job.variables)}
    logs = Path(tempfile.gettempdir(), f"bigbatch-torchrun-{secrets.token_hex(8)}")
    with ending_orphans(ASKS_TO_STOP, leaves=(logs,)) as watch:
        logs.mkdir(mode=0o700)
        try:
            argv = torchrun_argv(job, log_dir=str(logs))
            return run_in_foreground(argv, environ=variables, asks_to_stop=ASKS_TO_STOP, watch=watch).code
        finally:
            shutil.rmtree(logs, ignore_errors=True)


LAUNCHER = Launcher(
    default_ranks="1",
    environment_help="all",
    example="--nodes 2 --ranks-per-node 8 --node-rank 0 --master n0:29500 -- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    queue=FOREGROUND_QUEUE,
    visible="all",
)
