"""Launcher for ranks on this host without MPI or torchrun; they meet on the loopback interface only.

With --nodes it starts one node's part of a job, for example in a pod of a JobSet.
"""

import argparse
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace

from bigbatch.comm.rendezvous.addresses import loopback
from bigbatch.comm.rendezvous.environ import LISTENER_VARIABLE, with_secret
from bigbatch.comm.rendezvous.ports import free_port, hold_port
from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.launch.jobs.processes import NodeProcess, run_processes
from bigbatch.launch.jobs.restarts import describe_restarts, run_with_restarts
from bigbatch.launch.jobs.run_folder import count_joins, has_begun, heals_in_place
from bigbatch.launch.jobs.spec import SCHEDULER_FIELDS, JobSpec, refuse
from bigbatch.launch.launchers.base import FOREGROUND_QUEUE, Launcher, command_line
from bigbatch.user_settings import visible_gpus

REFUSED = {
    **dict.fromkeys(SCHEDULER_FIELDS, "this host has no queue: use bigbatch launch slurm"),
    **dict.fromkeys(("image", "mounts", "container"), "start bigbatch launch local inside the container"),
    "modules": "load modules in the shell before",
    "preflight": "run bigbatch launch preflight before",
    "logs": "it prints what all ranks print: add > FILE",
    "hosts": "it starts ranks on this host only: use bigbatch launch mpirun",
}
MAX_RANKS_OF_A_HOST = 4096
"""Limit of ranks on a host; each is a process that imports torch."""


def local_processes(job: JobSpec, *, port: int) -> tuple[NodeProcess, ...]:
    """Return the process of each rank, with the same variables as from torchrun; pure.

    Rank 0 serves the rendezvous; on one host it listens on loopback only.
    Raises: JobRefused for unsupported options, and for several nodes without --node-rank and --master.
    """
    refuse(job, launcher="local", refused=REFUSED)
    if job.ranks_per_node > MAX_RANKS_OF_A_HOST:
        raise LaunchOptionError(
            f"{job.ranks_per_node} ranks on one host are more than it can run: state {MAX_RANKS_OF_A_HOST} or fewer"
        )
    node_rank, (address, port) = rendezvous_of(job, port=port)
    if job.restarts and job.spans_nodes and not count_joins(job):
        raise LaunchOptionError(
            "--restarts: this launcher cannot restart other nodes: leave it out, or use mpirun, slurm or k8s; with "
            "--run.heal in_place it restarts single ranks"
        )
    first = node_rank * job.ranks_per_node
    shared = {"WORLD_SIZE": str(job.num_ranks), "LOCAL_WORLD_SIZE": str(job.ranks_per_node)}
    shared |= {"GROUP_RANK": str(node_rank), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return tuple(
        NodeProcess(
            node=0,
            argv=(sys.executable, *job.python_words),
            variables=(*{**shared, "RANK": str(first + rank), "LOCAL_RANK": str(rank)}.items(), *job.variables),
            name=f"rank {first + rank}",
        )
        for rank in range(job.ranks_per_node)
    )


def rendezvous_of(job: JobSpec, *, port: int) -> tuple[int, tuple[str, int]]:
    """Return this host's node index, and the rendezvous address: for one node, this port on loopback.

    Raises: LaunchOptionError for several nodes without --node-rank and --master.
    """
    nodes, node_rank, master = job.num_nodes or 1, job.node_rank, job.master
    if nodes == 1 and master is None and node_rank is None:
        return 0, (loopback(), port)
    if master is None or node_rank is None:
        raise LaunchOptionError(
            f"--nodes {nodes}: start this command on each node, with --master HOST:PORT of the first node and its own "
            f"--node-rank, 0 to {nodes - 1}"
        )
    if node_rank >= nodes:
        raise LaunchOptionError(f"--node-rank {node_rank} is not below --nodes {nodes}; the first node is 0")
    return node_rank, master


def node_launch_words(job: JobSpec, *, node_rank: str, master: str) -> list[str]:
    """Return the command line that starts a node's ranks by this launcher, without the job's own command.

    node_rank, master: placeholders that the node replaces.
    """
    several = ["--nodes", str(job.num_nodes), "--node-rank", node_rank, "--master", master]
    if joins := count_joins(job):
        several += ["--restarts", str(joins)]
    shape = [*(several if job.spans_nodes else []), "--ranks-per-node", str(job.ranks_per_node)]
    return ["launch", "local", *shape, *(["--python"] if job.is_python else []), "--"]


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    starts = local_processes(job, port=free_port())
    lines = [command_line(start.argv, start.variables).rstrip("\n") for start in starts]
    ending = "\n" if len(lines) == 1 else " &\nwait\n"
    return describe_restarts(job, joins=count_joins(job)) + " &\n".join(lines) + ending


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    def start(job: JobSpec) -> Ended:
        heals = has_begun(job) if heals_in_place(job) else None
        starts = _holding_port(job)
        variables = one_thread_per_rank(job) | with_own_secret(job, environ)
        return run_processes(
            starts,
            environ=variables,
            asks_to_stop=signal.SIGTERM,
            heals=heals,
            joins=count_joins(job),
            is_part=job.spans_nodes,
        )

    # all ranks of several nodes can only restart together
    return (start(job) if job.spans_nodes else run_with_restarts(start, job)).code


def _holding_port(job: JobSpec) -> tuple[NodeProcess, ...]:
    """Return the process of each rank; rank 0 inherits the socket that holds the port, unless --master states one."""
    if job.master is not None:
        return local_processes(job, port=0)
    holder = hold_port(loopback(), listens=job.num_ranks > 1 and not job.is_python)
    first, *others = local_processes(job, port=holder.getsockname()[1])
    fd = holder.detach()
    return (replace(first, variables=(*first.variables, (LISTENER_VARIABLE, str(fd))), descriptors=(fd,)), *others)


def with_own_secret(job: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the ranks' environment with a new secret; on several nodes with the common one, if it is set."""
    return dict(environ) if job.node_rank is not None else with_secret(environ)


def one_thread_per_rank(job: JobSpec) -> dict[str, str]:
    """Return variables for one CPU thread per rank, if the environment states no number."""
    return {"OMP_NUM_THREADS": "1"} if job.ranks_per_node > 1 else {}


LAUNCHER = Launcher(
    default_ranks="one per visible GPU, or 1",
    environment_help="all",
    example="-- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    queue=FOREGROUND_QUEUE,
    visible="all",
    count_ranks=lambda: len(visible_gpus(count_gpus())) or 1,
)
