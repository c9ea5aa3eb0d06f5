"""Ranks on this host alone, without MPI or torchrun: processes of our own, which meet on the loopback interface."""

import argparse
import ctypes
import signal
import socket
import sys
from collections.abc import Mapping

from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.launch.jobs.restarts import describe_restarts, run_healing
from bigbatch.launch.jobs.spec import SCHEDULED, JobSpec, refuse
from bigbatch.launch.jobs.together import NodeProcess, run_together
from bigbatch.launch.launchers.base import IN_A_TERMINAL, Launcher, command_line

REFUSED = {
    **dict.fromkeys(SCHEDULED, "this host has no queue: use bigbatch launch slurm"),
    **dict.fromkeys(("image", "mounts", "container"), "start bigbatch launch local inside the container"),
    "modules": "load modules in the shell before",
    "preflight": "run bigbatch launch preflight before",
    "logs": "it prints what all ranks print: add > FILE",
    "hosts": "it starts ranks on this host only: use bigbatch launch mpirun",
    **dict.fromkeys(("num_nodes", "node_rank", "master"), "it starts ranks on this host only: use torchrun, or mpirun"),
}
LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def local_starts(job: JobSpec, *, port: int) -> tuple[NodeProcess, ...]:
    """Return the process of each rank, with the variables that torchrun would give it; pure.

    Rank 0 serves the rendezvous, at the port of the loopback interface alone.
    Raises: JobRefused for what one host cannot do.
    """
    refuse(job, launcher="local", refused=REFUSED)
    size = str(job.num_ranks)
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    shared |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    return tuple(
        NodeProcess(
            node=0,
            argv=(sys.executable, *job.python_words),
            variables=(*{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items(), *job.variables),
            name=f"rank {rank}",
        )
        for rank in range(job.num_ranks)
    )


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    starts = local_starts(job, port=free_port())
    lines = [command_line(start.argv, start.variables).rstrip("\n") for start in starts]
    return describe_restarts(job) + " &\n".join(lines) + ("\n" if len(lines) == 1 else " &\nwait\n")


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    def start(job: JobSpec) -> Ended:
        starts = local_starts(job, port=free_port())
        return run_together(
            starts, environ=shared_cores(job) | dict(environ), enter=_end_with_parent, asks_to_stop=signal.SIGTERM
        )

    return run_healing(start, job).code


def _end_with_parent(node: int) -> None:
    """Let this process be asked to stop when its launcher dies, who can pass on nothing any more; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def shared_cores(job: JobSpec) -> dict[str, str]:
    """Return what keeps a host's ranks to one thread each, where the environment states no number."""
    return {"OMP_NUM_THREADS": "1"} if job.ranks_per_node > 1 else {}


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
    sees="all",
    count_ranks=lambda: count_gpus() or 1,
)
