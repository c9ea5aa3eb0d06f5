"""The ranks of one measurement: their meeting, messages, peers and end; gloo, MPI and Horovod in the same processes."""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from bigbatch.comm.backends.mpi import finalize_mpi
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.by_mpi import mpi_world
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.rendezvous.exit_record import record_end
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.launcher import MPI_LAUNCHERS
from bigbatch.errors import UserError

TIMEOUT_SECONDS = 300.0
"""A silent peer ends the job after this: the largest sums on the slowest link take tens of seconds."""
HOROVOD_ROUND = 5
"""Repetitions of Horovod in a row. Its threads talk every millisecond even when idle, which slows all others down (seen
once, 8 ranks on 2 busy cores: a short sum of ours took 12.5 ms instead of 1.5), so it runs only in its rounds."""


@dataclass(frozen=True)
class Job:
    """The ranks of one job, connected over tcp, and their common start."""

    communicator: Communicator
    meeting_N: Tensor
    interface: str | None
    """Interface with the counters to read; None: all but loopback."""

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def num_nodes(self) -> int:
        return self.communicator.connection.topology.num_nodes

    def meet(self) -> None:
        """Wait for all ranks; they leave within about a millisecond of each other. Collective."""
        self.communicator.sum_(self.meeting_N, label="meeting before a repetition")

    def gather(self, value: Any) -> list[Any]:
        """Gather a JSON value of every rank. Collective."""
        return self.communicator.gather(value)

    def say(self, text: str) -> None:
        """Print a line on rank 0's standard error."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)


def join(*, interface: str | None) -> Job:
    """Meet the other ranks. Raises: CommError."""
    torch.set_num_threads(1)
    communicator = connect(
        backend="tcp",
        algorithm="doubling",
        interface=interface,
        timeout_seconds=TIMEOUT_SECONDS,
        warn_seconds=TIMEOUT_SECONDS,
        device=torch.device("cpu"),
    )
    return Job(communicator, communicator.allocate(1, torch.float32), interface)


def open_gloo(job: Job) -> None:
    """Make gloo's default process group of all ranks. Collective."""
    control = job.communicator.connection.control
    assert isinstance(control, JobControl)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("benchmark/gloo", control.store.torch_store),
        rank=job.rank,
        world_size=job.communicator.world_size,
        timeout=timedelta(minutes=10),
    )


def open_horovod(job: Job) -> Any:
    """Import horovod.torch, not yet initialised, or return the reason why there is none. Collective."""
    env = job.communicator.env
    if env.launcher not in MPI_LAUNCHERS:
        return f"the job was started by {env.launcher}, not by mpirun"
    if isinstance(world := mpi_world(env), str):  # MPI starts with our settings, and outlives Horovod's stop
        return world
    try:
        import horovod.torch as horovod
    except ImportError as error:
        return f"Horovod is not installed ({error})"
    return horovod if horovod.mpi_built() else "Horovod was built without MPI"


def close(job: Job) -> None:
    """End gloo and our connection. Collective."""
    job.meet()
    dist.destroy_process_group()
    job.communicator.close()


def run_rank(run: Callable[[], None]) -> None:
    """Run a rank's program and end the process: one line and 1 for a user's error.

    Skips the interpreter's teardown, in which threads of gloo and Horovod may abort; a failed rank waits for no other.
    """
    code = 0
    try:
        run()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    record_end(read_process_env(), code)
    if code == 0 and "mpi4py.MPI" in sys.modules:  # mpirun takes a rank that ends without it for a failed one
        finalize_mpi()
    os._exit(code)
