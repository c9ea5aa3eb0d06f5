"""Launcher for Open MPI's mpirun (5.x): argument list, preflight of the hosts, and restarts on fewer hosts."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bigbatch.comm.rendezvous.environ import SECRET_VARIABLE, TERMINAL_VARIABLE, terminal_columns
from bigbatch.errors import UserError, tell
from bigbatch.exit_codes import INTERRUPTED
from bigbatch.launch.jobs.exit_file import as_first_rank_ended, exit_file, exit_path, telling
from bigbatch.launch.jobs.fit_hosts import on_hosts_left, preflight_of, without
from bigbatch.launch.jobs.foreground import Ended, run_in_foreground
from bigbatch.launch.jobs.installed import find_mpirun, require_interface
from bigbatch.launch.jobs.restarts import describe_restarts, run_healing
from bigbatch.launch.jobs.run_folder import RunLeft, heals_in_place, known_experiment, seconds_to_leave
from bigbatch.launch.jobs.spec import SCHEDULED, JobSpec, refuse
from bigbatch.launch.launchers.base import IN_A_TERMINAL, Launcher, command_line
from bigbatch.orphans import ending_orphans

ASKS_TO_STOP = signal.SIGUSR1
"""Signal that mpirun passes on to the ranks without a deadline; after SIGTERM it kills within a second."""

ANSWER_SECONDS = 30.0
"""Time for a host to start a program before it counts as lost."""

FORWARDED = ("NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "OMP_", SECRET_VARIABLE)
"""Prefixes of variables that are passed to ranks on other hosts; mpirun itself passes none."""

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
    options: Sequence[str] = ("--map-by", "slot"),
) -> list[str]:
    """Return mpirun's command line with one process per rank; pure.

    Ranks are not bound to cores (each would decode and compute on one); waiting ranks yield their core if ranks
    outnumber cores. mpirun passes SIGUSR1 to all ranks, which then save a checkpoint and stop. If the job heals in
    place, mpirun does not end the others after a rank fails, and exits with 0.
    variables: names of the variables set here; mpirun's environment must have job.variables. options: of mpirun itself.
    Raises: LaunchOptionError for options that need a scheduler.
    """
    refuse(job, launcher="mpirun", refused=REFUSED)
    argv = [mpirun, "-n", str(job.num_ranks), "--bind-to", "none", *options]
    if is_root:
        argv.append("--allow-run-as-root")
    if job.hosts:
        argv += ["--host", ",".join(f"{host}:{count}" for host, count in job.hosts)]
    if job.oversubscribe:
        argv += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    stated = dict(job.variables)
    if heals_in_place(job):
        argv += ["--runtime-options", "recoverable,error-nonzero-status=0"]
    if job.interface:
        argv += ["--prtemca", "oob_tcp_if_include", job.interface, "--mca", "btl_tcp_if_include", job.interface]
    for name in sorted(name for name in variables if job.hosts and name.startswith(FORWARDED)):
        if name not in stated:
            argv += ["-x", name]
    # names only: all users of a host see a command line, but not the environment
    for name in (*stated, *(name for name, _ in job.taken)):
        argv += ["-x", name]
    # ranks write into a pipe and cannot see the terminal's width
    argv += ["-x", f"{TERMINAL_VARIABLE}={terminal_columns}"]
    return [*argv, sys.executable, *job.python_words]


def look_at_hosts(job: JobSpec, *, environ: Mapping[str, str]) -> tuple[Ended, list[str]]:
    """Run a preflight on all slots of all hosts; return its end and the unfit hosts."""
    bad = _bad_nodes_path()
    try:
        looked = _run(_looking(job), environ=environ, leaves=(bad,))
        return looked, bad.read_text().split() if bad.exists() else []
    finally:
        bad.unlink(missing_ok=True)


def show_look(job: JobSpec, *, environ: Mapping[str, str]) -> str:
    """Return the command line of look_at_hosts."""
    looking = _looking(job)
    return command_line(_argv_here(looking, environ=environ), looking.variables)


def _bad_nodes_path() -> Path:
    return Path.cwd() / f".preflight-{os.getpid()}"  # the first host writes it and sees this folder


def _looking(job: JobSpec) -> JobSpec:
    slots = sum(count for _, count in job.hosts)
    command = (*job.command, "--bad-nodes", str(_bad_nodes_path()))
    return replace(job, command=command, num_ranks=slots or job.num_ranks, preflight=None)


def _without_unfit(job: JobSpec, *, environ: Mapping[str, str]) -> tuple[Ended | None, JobSpec]:
    """Run the preflight that --preflight requests; return its end if the job does not start, and the job to start."""
    looked, bad = look_at_hosts(preflight_of(job), environ=environ)
    if looked.was_asked:  # after Ctrl-C nothing starts
        return replace(looked, code=looked.code or INTERRUPTED), job
    if looked.code == 0 or job.preflight == "warn":
        return None, job
    if job.preflight == "exclude" and bad:
        fit = without(job, bad)
        tell(f"starting without {', '.join(bad)}")
        return None, fit
    return looked, job


def _argv_here(job: JobSpec, *, environ: Mapping[str, str]) -> list[str]:
    return mpirun_argv(
        job,
        mpirun=find_mpirun(),
        is_root=os.geteuid() == 0,
        terminal_columns=terminal_columns() or 0,
        variables=environ,
    )


def _answers(host: str, job: JobSpec, *, environ: Mapping[str, str]) -> bool:
    """Return whether mpirun can start a program on the host."""
    argv = _argv_here(replace(job, hosts=((host, 1),), num_ranks=1), environ=environ)
    ranks_at = len(argv) - len(job.python_words) - 1
    process = subprocess.Popen(
        [*argv[:ranks_at], "true"],
        env=dict(environ) | dict(job.variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=ANSWER_SECONDS) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its ssh
        process.wait()
        return False


def _on_hosts_left(job: JobSpec, *, environ: Mapping[str, str]) -> JobSpec:
    return on_hosts_left(job, answers=partial(_answers, job=job, environ=environ))


def _run_part(fit: JobSpec, *, job: JobSpec, environ: Mapping[str, str]) -> Ended:
    """Run the job on its remaining hosts until more hosts answer, so that it can continue with more ranks."""

    def has_grown() -> bool:
        try:
            return _on_hosts_left(job, environ=environ).num_ranks > fit.num_ranks
        except (UserError, OSError):  # too few hosts, or an edited experiment: the running job continues
            return False

    # the request may kill a user's script without saving
    is_waiting = fit.num_ranks < job.num_ranks and not job.is_python
    return _run(fit, environ=environ, is_recalled=has_grown if is_waiting else None)


def _run(
    job: JobSpec,
    *,
    environ: Mapping[str, str],
    is_recalled: Callable[[], bool] | None = None,
    leaves: Sequence[Path] = (),
) -> Ended:
    if job.interface is not None:
        require_interface(job.interface)
    config = known_experiment(job)
    heals = heals_in_place(job)
    heal_seconds = seconds_to_leave(config.comm.timeout_seconds, heals=True) if config and heals else None
    name = exit_path(Path.cwd())  # the first of other hosts sees this folder
    with ending_orphans(ASKS_TO_STOP, leaves=(*leaves, name)) as watch, exit_file(name) as path:
        told = replace(job, environment=(*job.environment, *telling(path)))
        ended = run_in_foreground(
            _argv_here(told, environ=environ),
            environ=dict(environ) | dict(told.variables),
            asks_to_stop=ASKS_TO_STOP,
            is_recalled=is_recalled,
            has_left=RunLeft(config.run.directory if config else None, start=str(path), heal_seconds=heal_seconds)
            if path
            else None,
            watch=watch,
        )
        return as_first_rank_ended(ended, job, path=path, heals=heals)


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    look = "" if job.preflight is None else show_look(preflight_of(job), environ=environ)
    return look + describe_restarts(job) + command_line(_argv_here(job, environ=environ), job.variables)


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    if job.preflight is not None:
        ended, job = _without_unfit(job, environ=environ)
        if ended is not None:
            return ended.code
    start = partial(_run_part, job=job, environ=environ)
    return run_healing(start, job, refit=partial(_on_hosts_left, environ=environ)).code


LAUNCHER = Launcher(
    name="mpirun",
    help="start ranks by Open MPI's mpirun",
    default_ranks="all slots of --hosts, else 1",
    passes=f"all on this host; on --hosts, those that begin with {', '.join(FORWARDED)}",
    example="--hosts n0:8,n1:8 -- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    queue=IN_A_TERMINAL,
)
