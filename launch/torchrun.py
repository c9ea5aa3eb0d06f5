"""The argument list of torchrun, on one host."""

import signal
import sys

from bigbatch.launch.job import JobSpec
from bigbatch.trainer.errors import ConfigError

ASKS_TO_STOP = signal.SIGTERM
"""torchrun passes it on and waits 30 seconds for the ranks; SIGUSR1 would end torchrun and leave them behind."""


def torchrun_argv(job: JobSpec) -> list[str]:
    """torchrun with one process per rank on this host; pure.

    Started as a module, so that it runs in this Python whatever is on PATH.
    Raises: ConfigError for other hosts: torchrun is started on each host by the cluster's own launcher.
    """
    if job.hosts:
        raise ConfigError("--hosts: torchrun starts ranks on its own host only; use mpirun, or srun with torchrun")
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={job.num_ranks}", "-m", "bigbatch", *job.command),
    ]
