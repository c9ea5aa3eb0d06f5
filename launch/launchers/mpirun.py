"""The argument list of Open MPI's mpirun (5.x)."""

import signal
import sys
from collections.abc import Iterable

from bigbatch.comm.rendezvous.environ import TERMINAL_VARIABLE
from bigbatch.launch.jobs.spec import SCHEDULED, JobSpec, interface_variables, refuse

ASKS_TO_STOP = signal.SIGUSR1
"""What makes mpirun pass on a request to stop, without a deadline; after SIGTERM it kills within a second."""

FORWARDED = ("NCCL_", "GLOO_", "MASTER_", "OMP_")
"""Variables so named reach the ranks on other hosts, too; mpirun passes on none by itself."""

REFUSED = {
    **dict.fromkeys(SCHEDULED, "mpirun has no queue: use bigbatch launch slurm, or run mpirun inside a job"),
    **dict.fromkeys(("image", "mounts", "container"), "start bigbatch launch mpirun inside the container"),
    "num_nodes": "name the nodes, such as --hosts n0:8,n1:8",
    "node_rank": "mpirun starts all nodes itself: leave it out",
    "master": "mpirun's ranks find each other: leave it out",
    "modules": "load modules in the shell before, or in the profile of the other hosts",
    "logs": "mpirun prints what all ranks print: add > FILE",
}


def mpirun_argv(
    job: JobSpec,
    *,
    mpirun: str = "mpirun",
    is_root: bool = False,
    terminal_columns: int = 0,
    variables: Iterable[str] = (),
) -> list[str]:
    """mpirun with one process per rank; pure, so that --dry-run shows what would run.

    Ranks are not bound to cores (each would decode and compute on one), and those that wait yield theirs where
    ranks outnumber cores. mpirun passes SIGUSR1 on to all ranks, which then save a checkpoint and stop.
    variables are the names of those that are set here.
    Raises: ConfigError for what only a scheduler can do.
    """
    refuse(job, launcher="mpirun", refused=REFUSED)
    argv = [mpirun, "-n", str(job.num_ranks), "--bind-to", "none", "--map-by", "slot"]
    if is_root:
        argv.append("--allow-run-as-root")
    if job.hosts:
        argv += ["--host", ",".join(f"{host}:{count}" for host, count in job.hosts)]
    if job.oversubscribe:
        argv += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    stated = dict((*interface_variables(job.interface), *job.environment))
    if job.interface:
        argv += ["--prtemca", "oob_tcp_if_include", job.interface, "--mca", "btl_tcp_if_include", job.interface]
    for name in sorted(name for name in variables if job.hosts and name.startswith(FORWARDED)):
        if name not in stated:
            argv += ["-x", name]
    for name, value in stated.items():
        argv += ["-x", f"{name}={value}"]
    argv += ["-x", f"{TERMINAL_VARIABLE}={terminal_columns}"]
    return [*argv, sys.executable, "-m", "bigbatch", *job.command]
