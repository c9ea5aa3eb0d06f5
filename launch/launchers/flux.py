"""Launcher for Flux: flux run, in the foreground of a login node or of a flux batch script."""

import argparse
import signal
import sys
from collections.abc import Mapping

from bigbatch.comm.rendezvous.environ import NOTICE_VARIABLE, with_secret
from bigbatch.launch.jobs.foreground import run_in_foreground
from bigbatch.launch.jobs.restarts import describe_restarts, run_with_restarts
from bigbatch.launch.jobs.run_folder import refuse_healing
from bigbatch.launch.jobs.spec import JobSpec, check_time, refuse
from bigbatch.launch.jobs.validation import UNLIMITED
from bigbatch.launch.launchers.base import Launcher, command_line

ASKS_TO_STOP = signal.SIGUSR1
"""Signal that flux run passes on to the ranks."""

REFUSED = {
    **dict.fromkeys(("image", "mounts", "container"), "start bigbatch launch flux inside the container"),
    **dict.fromkeys(("qos", "reservation", "gpu_type"), "state a property of the nodes by --constraint"),
    **dict.fromkeys(("node_rank", "master"), "flux starts all nodes itself: leave it out"),
    "hosts": "flux chooses the nodes: state --nodes, or --constraint hosts:n[0-3]",
    "sbatch": "that is an option of Slurm: leave it out",
    "mpi": "Flux's PMI serves all MPI libraries: leave it out",
    "memory": "Flux gives cores, GPUs and nodes: leave it out",
    "array": "use bigbatch sweep, or flux bulksubmit",
    "modules": "load modules in the shell before: flux run passes on its variables",
    "preflight": "leave it out, or run bigbatch launch preflight on --hosts before",
    "logs": "flux run prints what all ranks print: add > FILE",
    "queue": "a queue of Flux is --partition",
}


def flux_argv(job: JobSpec) -> list[str]:
    """Return flux's command line, with the same number of tasks on each node; pure.

    Without --cpus-per-rank the job has whole nodes. Source: flux-run(1) of flux-core 0.88.
    Raises: LaunchOptionError for unsupported options, a job that heals in place, and a time limit that leaves no time
    to train.
    """
    refuse(job, launcher="flux", refused=REFUSED)
    refuse_healing(job, launcher="flux")
    check_time(job, stop_seconds=job.grace_seconds)
    excluded = None if job.exclude is None else f"not hosts:{job.exclude}"
    needs = [need for need in (job.constraint and f"({job.constraint})", excluded) if need]
    options = {
        "nodes": job.num_nodes or 1,
        "tasks-per-node": job.ranks_per_node,
        "cores": None if job.cpus_per_rank is None else job.cpus_per_rank * job.num_ranks,
        "gpus-per-node": job.gpus_per_node,
        "job-name": job.name,
        "time-limit": None if job.minutes in (None, UNLIMITED) else f"{job.minutes}m",
        "queue": job.partition,
        "bank": job.account,
        "requires": " and ".join(needs) or None,
        "signal": f"USR1@{job.grace_seconds}s" if _has_notice(job) else None,
    }
    stated = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return ["flux", "run", *stated, sys.executable, *job.python_words]


def _has_notice(job: JobSpec) -> bool:
    return job.grace_seconds > 0 and (job.minutes not in (None, UNLIMITED) or job.stop_seconds is not None)


def _variables(job: JobSpec) -> dict[str, str]:
    notice = {NOTICE_VARIABLE: str(job.grace_seconds)} if _has_notice(job) else {}
    return notice | dict(job.variables)


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    return describe_restarts(job) + command_line(flux_argv(job), [*_variables(job).items()])


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    variables = with_secret(environ) | _variables(job)
    return run_with_restarts(
        lambda job: run_in_foreground(flux_argv(job), environ=variables, asks_to_stop=ASKS_TO_STOP), job
    ).code


LAUNCHER = Launcher(
    default_ranks="1 per node",
    environment_help="all",
    example="--nodes 2 --ranks-per-node 8 --gpus-per-node 8 -- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    queue="list jobs by flux jobs, end one by flux cancel; flux job kill -s USR1 JOB saves a checkpoint first",
)
