"""Peers of the measurements: gloo, MPI and Horovod, beside our communicator in the same processes."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from benchmarks.comm.job import Job
from bigbatch.comm.rendezvous.by_mpi import mpi_world
from bigbatch.comm.rendezvous.launcher import MPI_LAUNCHERS

HOROVOD_ROUND = 5
"""Repetitions of Horovod in a row. Its threads talk every millisecond even when idle, which slows all others down (seen
once, 8 ranks on 2 busy cores: a short sum of ours took 12.5 ms instead of 1.5), so it runs only in its rounds."""


def open_gloo(job: Job) -> None:
    """Make gloo's default process group of all ranks. Collective."""
    dist.init_process_group(
        "gloo",
        store=PrefixStore("benchmark/gloo", job.communicator.control.store.torch_store),
        rank=job.rank,
        world_size=job.communicator.world_size,
        timeout=timedelta(minutes=10),
    )


def open_mpi(job: Job) -> Any:
    """Return MPI's world, or the reason why there is none. Collective."""
    env = job.communicator.env
    if env.launcher not in MPI_LAUNCHERS:
        return f"the job was started by {env.launcher}, not by mpirun"
    return mpi_world(env)


def open_horovod(job: Job) -> Any:
    """Import horovod.torch, not yet initialised, or return the reason why there is none. Collective."""
    env = job.communicator.env
    if env.launcher not in MPI_LAUNCHERS:
        return f"the job was started by {env.launcher}, not by mpirun"
    mpi_world(env)  # MPI starts with our settings, and outlives Horovod's stop
    try:
        import horovod.torch as horovod
    except ImportError as error:
        return f"Horovod is not installed ({error})"
    return horovod if horovod.mpi_built() else "Horovod was built without MPI"


def close(job: Job) -> None:
    """End gloo and our connections. Collective."""
    job.meet()
    dist.destroy_process_group()
    for communicator in (*job.others, job.communicator):
        communicator.close()
