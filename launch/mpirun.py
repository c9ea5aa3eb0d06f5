"""The argument list of Open MPI's mpirun (5.x)."""

import sys

from bigbatch.comm.environ import TERMINAL_VARIABLE
from bigbatch.launch.job import JobSpec


def mpirun_argv(job: JobSpec, *, mpirun: str = "mpirun", is_root: bool = False, terminal_columns: int = 0) -> list[str]:
    """mpirun with one process per rank; pure, so that --dry-run shows what would run.

    Ranks are not bound to cores (each would decode and compute on one), and those that wait yield theirs where
    ranks outnumber cores. mpirun passes SIGUSR1 on to all ranks, which then save a checkpoint and stop.
    """
    argv = [mpirun, "-n", str(job.num_ranks), "--bind-to", "none", "--map-by", "slot"]
    if is_root:
        argv.append("--allow-run-as-root")
    if job.hosts:
        argv += ["--host", ",".join(f"{host}:{count}" for host, count in job.hosts)]
    if job.oversubscribe:
        argv += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    argv += ["-x", f"{TERMINAL_VARIABLE}={terminal_columns}"]
    return [*argv, sys.executable, "-m", "bigbatch", *job.command]
