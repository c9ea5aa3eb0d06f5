"""The argument list of torchrun: on one host, or this host's part of a job on several."""

import signal
import sys

from bigbatch.errors import ConfigError
from bigbatch.launch.jobs.spec import SCHEDULED, JobSpec, refuse

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

LOCAL_REFUSED = {
    **dict.fromkeys(SCHEDULED, "this host has no queue: use bigbatch launch slurm"),
    **dict.fromkeys(("image", "mounts", "container"), "start bigbatch launch local inside the container"),
    "modules": "load modules in the shell before",
    "preflight": "run bigbatch launch preflight before",
    "logs": "it prints what all ranks print: add > FILE",
    "hosts": "it starts ranks on this host only: use bigbatch launch mpirun",
    **dict.fromkeys(("num_nodes", "node_rank", "master"), "it starts ranks on this host only: use torchrun, or mpirun"),
}


def torchrun_argv(job: JobSpec, *, launcher: str = "torchrun") -> list[str]:
    """torchrun with one process per rank of this host; pure.

    Started as a module, so that it runs in this Python whatever is on PATH.
    Raises: ConfigError for what torchrun cannot do, and for several nodes without --node-rank and --master.
    """
    refuse(job, launcher=launcher, refused=LOCAL_REFUSED if launcher == "local" else REFUSED)
    return [
        *(sys.executable, "-m", "torch.distributed.run", *_rendezvous(job)),
        *(f"--nproc-per-node={job.ranks_per_node}", "-m", "bigbatch", *job.command),
    ]


def _rendezvous(job: JobSpec) -> list[str]:
    nodes = job.num_nodes or 1
    if nodes == 1 and job.master is None and job.node_rank is None:
        return ["--standalone"]
    if job.master is None or job.node_rank is None:
        raise ConfigError(
            f"--nodes {nodes}: torchrun is started on each node: add --master HOST:PORT, of the first node and the "
            f"same on all, and --node-rank, 0 to {nodes - 1}"
        )
    if job.node_rank >= nodes:
        raise ConfigError(f"--node-rank {job.node_rank} is not below --nodes {nodes}; the first node is 0")
    host, port = job.master
    return [f"--nnodes={nodes}", f"--node-rank={job.node_rank}", f"--master-addr={host}", f"--master-port={port}"]
