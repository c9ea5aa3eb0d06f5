"""The argument list of torchrun: on one host, or this host's part of a job on several."""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.foreground import run_in_foreground
from bigbatch.launch.jobs.spec import SCHEDULED, JobSpec, refuse
from bigbatch.launch.launchers.base import IN_A_TERMINAL, Launcher, command_line

MakeArgv = Callable[[JobSpec], list[str]]
"""Returns the words that start all ranks of this host."""
ASKS_TO_STOP = signal.SIGTERM
"""torchrun passes it on and waits 30 seconds for the ranks; SIGUSR1 would end torchrun and leave them behind."""

REFUSED = {
    **dict.fromkeys(SCHEDULED, "torchrun has no queue: use bigbatch launch slurm, or run torchrun inside a job"),
    **dict.fromkeys(("image", "mounts", "container"), "start bigbatch launch torchrun inside the container"),
    "hosts": "torchrun starts ranks on its own host only: use mpirun, or --nodes and --node-rank on each host",
    "modules": "load modules in the shell before",
    "preflight": "run bigbatch launch preflight before",
    "logs": "torchrun prints what all ranks print: add > FILE",
}


def torchrun_argv(job: JobSpec) -> list[str]:
    """Return the words of torchrun with one process per rank of this host; pure.

    Raises: LaunchOptionError for what torchrun cannot do, and for several nodes without --node-rank and --master.
    """
    refuse(job, launcher="torchrun", refused=REFUSED)
    return rank_argv(job)


def rank_argv(job: JobSpec) -> list[str]:
    """Return the same words for a job whose options were looked at before.

    torchrun is started as a module, so that it runs in this Python whatever is on PATH.
    Raises: LaunchOptionError for several nodes without --node-rank and --master.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run", *_rendezvous(job)),
        *(f"--nproc-per-node={job.ranks_per_node}", *_kept(job.python_words)),
    ]


def _kept(words: tuple[str, ...]) -> list[str]:
    """Return words that torchrun hands on whole: a -- directly behind script or module it takes for its own."""
    name_at = 1 if words[0] == "-m" else 0
    twice = ("--",) if words[name_at + 1 : name_at + 2] == ("--",) else ()
    return [*words[: name_at + 1], *twice, *words[name_at + 1 :]]


def _rendezvous(job: JobSpec) -> list[str]:
    nodes = job.num_nodes or 1
    if nodes == 1 and job.master is None and job.node_rank is None:
        return ["--standalone"]
    if job.master is None or job.node_rank is None:
        raise LaunchOptionError(
            f"--nodes {nodes}: torchrun is started on each node: add --master HOST:PORT, of the first node and the "
            f"same on all, and --node-rank, 0 to {nodes - 1}"
        )
    if job.node_rank >= nodes:
        raise LaunchOptionError(f"--node-rank {job.node_rank} is not below --nodes {nodes}; the first node is 0")
    host, port = job.master
    return [f"--nnodes={nodes}", f"--node-rank={job.node_rank}", f"--master-addr={host}", f"--master-port={port}"]


def dry_run(make_argv: MakeArgv, job: JobSpec, environ: Mapping[str, str]) -> str:
    """Return the command that a job becomes, with the variables that its ranks get."""
    return command_line(make_argv(job), job.variables)


def start(make_argv: MakeArgv, job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    """Run all ranks of this host in the foreground and return their exit code."""
    # as torchrun does itself, but without its five lines about it
    threads = {"OMP_NUM_THREADS": "1"} if job.ranks_per_node > 1 else {}
    variables = {**threads, **environ, **dict(job.variables)}
    return run_in_foreground(make_argv(job), environ=variables, asks_to_stop=ASKS_TO_STOP).code


LAUNCHER = Launcher(
    name="torchrun",
    help="start this host's ranks by torchrun; with --nodes, on each host",
    default_ranks="1",
    passes="all",
    example="--nodes 2 --ranks-per-node 8 --node-rank 0 --master n0:29500 -- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=partial(dry_run, torchrun_argv),
    start=partial(start, torchrun_argv),
    queue=IN_A_TERMINAL,
    sees="all",
)
