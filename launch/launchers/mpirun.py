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
from bigbatch.errors import INTERRUPTED, UNFIT, LaunchOptionError, UserError, print_line, tell
from bigbatch.files import read_plain
from bigbatch.launch.jobs.exit_file import exit_file, exit_file_variable, exit_path, with_code_of_first_rank
from bigbatch.launch.jobs.fit_hosts import (
    has_whole_preflight,
    on_remaining_hosts,
    preflight_of,
    short_preflight_of,
    without_hosts,
    write_hostfile,
)
from bigbatch.launch.jobs.foreground import Ended, run_in_foreground, start_process, wait_or_kill
from bigbatch.launch.jobs.installed import find_mpirun, require_interface
from bigbatch.launch.jobs.ranks_here import LeftBehind
from bigbatch.launch.jobs.restarts import describe_restarts, run_with_restarts
from bigbatch.launch.jobs.run_folder import FirstRankWatch, exit_wait_seconds, heals_in_place, try_load_experiment
from bigbatch.launch.jobs.spec import SCHEDULER_FIELDS, JobSpec, refuse
from bigbatch.launch.launchers.base import FOREGROUND_QUEUE, Launcher, command_line
from bigbatch.orphans import ending_orphans
from bigbatch.parts import load
from bigbatch.trainer.machine.nvidia import may_have_gpus
from bigbatch.user_settings import stated_gpus

ASKS_TO_STOP = signal.SIGUSR1
"""Signal that mpirun passes on to the ranks without a deadline; after SIGTERM it kills within a second."""

SHORT_PREFLIGHT = "bigbatch.tools.preflight.short.report"
"""Import path, loaded before a job."""
ANSWER_SECONDS = 30.0
"""Time for a host to start a program before it counts as lost."""

FORWARDED = ("NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "OMP_", "GOMP_", SECRET_VARIABLE)
"""Prefixes of variables that are passed to ranks on other hosts; mpirun itself passes none."""

REFUSED = {
    **dict.fromkeys(SCHEDULER_FIELDS, "mpirun has no queue: use bigbatch launch slurm, or run mpirun inside a job"),
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
    # with /dev/null as input, mpirun leaves rank 0 an open pipe without data, on which a read waits forever
    argv = [mpirun, "-n", str(job.num_ranks), "--stdin", "none", "--bind-to", "none", *options]
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
    for name in (*stated, *(name for name, _ in job.forwarded)):
        argv += ["-x", name]
    # ranks write into a pipe and cannot see the terminal's width
    argv += ["-x", f"{TERMINAL_VARIABLE}={terminal_columns}"]
    return [*argv, sys.executable, *job.python_words]


def run_preflight(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    """Test all hosts; return the exit code; with --dry-run print the command. Raises: LaunchOptionError."""
    good_hosts = options.good_hosts
    if good_hosts and not job.hosts:
        raise LaunchOptionError("--good-hosts writes which of the stated hosts are fit: give --hosts or --hostfile")
    if options.dry_run:
        print(_preflight_line(job, environ=environ), end="")
        return 0
    ended, bad = _preflight_hosts(job, environ=environ)
    if good_hosts and ended.code in (0, UNFIT):
        write_hostfile(good_hosts, job.hosts, bad=bad)
        print_line(f"written: {good_hosts}")
    return ended.code


def _preflight_hosts(job: JobSpec, *, environ: Mapping[str, str]) -> tuple[Ended, list[str]]:
    """Run a preflight on all slots of all hosts; return its end and the unfit hosts."""
    bad = _bad_nodes_path()
    try:
        ended = _run(_preflight_job(job), environ=environ, leaves=(bad,))
        return ended, read_plain(bad).decode().split() if bad.exists() else []
    finally:
        bad.unlink(missing_ok=True)


def _preflight_line(job: JobSpec, *, environ: Mapping[str, str]) -> str:
    """Return the command line of _preflight_hosts."""
    preflight = _preflight_job(job)
    return command_line(_argv_here(preflight, environ=environ), preflight.variables)


def _bad_nodes_path() -> Path:
    return Path.cwd() / f".preflight-{os.getpid()}"  # the first host writes it and sees this folder


def _preflight_job(job: JobSpec) -> JobSpec:
    slots = sum(count for _, count in job.hosts)
    command = (*job.command, "--bad-nodes", str(_bad_nodes_path()))
    return replace(job, command=command, num_ranks=slots or job.num_ranks, preflight=None)


def _without_unfit(job: JobSpec, *, environ: Mapping[str, str]) -> tuple[Ended | None, JobSpec]:
    """Run the preflight that --preflight requests; return its end if the job does not start, and the job to start."""
    ended, bad = _preflight_hosts(preflight_of(job), environ=environ)
    if ended.was_asked:  # after Ctrl-C nothing starts
        return replace(ended, code=ended.code or INTERRUPTED), job
    if ended.code == 0 or job.preflight == "warn":
        return None, job
    if job.preflight == "exclude" and bad:
        fit = without_hosts(job, bad)
        tell(f"starting without {', '.join(bad)}")
        return None, fit
    return ended, job


def _short_preflight(job: JobSpec, *, environ: Mapping[str, str]) -> int | None:
    """Test each host alone; return the exit code if the job does not start. Without hosts, no process is started."""
    short = short_preflight_of(job)
    if short is None:
        return None
    if not job.hosts:
        if not may_have_gpus():  # before the test is imported, which takes a third of a second
            return None
        visible = stated_gpus(dict(environ) | dict(job.variables))
        code: int = load(SHORT_PREFLIGHT)(num_ranks=job.num_ranks, world_size=job.num_ranks, visible=visible)
        return code or None
    environ = dict(environ) | dict(short.variables)
    ended = run_in_foreground(_argv_here(short, environ=environ), environ=environ, asks_to_stop=ASKS_TO_STOP)
    if ended.was_asked:
        return ended.code or INTERRUPTED
    return ended.code if ended.code == UNFIT else None  # other failures are the job's own, too


def _argv_here(job: JobSpec, *, environ: Mapping[str, str]) -> list[str]:
    return mpirun_argv(
        job,
        mpirun=find_mpirun(),
        is_root=os.geteuid() == 0,
        terminal_columns=terminal_columns() or 0,
        variables=environ,
    )


def _is_reachable(host: str, job: JobSpec, *, environ: Mapping[str, str]) -> bool:
    """Return whether mpirun can start a program on the host."""
    argv = _argv_here(replace(job, hosts=((host, 1),), num_ranks=1), environ=environ)
    ranks_at = len(argv) - len(job.python_words) - 1
    process = start_process(
        [*argv[:ranks_at], "true"],
        environ=dict(environ) | dict(job.variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return wait_or_kill(process, seconds=ANSWER_SECONDS) == 0


def _on_remaining_hosts(job: JobSpec, *, environ: Mapping[str, str]) -> JobSpec:
    return on_remaining_hosts(job, answers=partial(_is_reachable, job=job, environ=environ))


def _run_until_hosts_return(fit: JobSpec, *, job: JobSpec, environ: Mapping[str, str]) -> Ended:
    """Run the job on its remaining hosts until more hosts answer, so that it can continue with more ranks."""

    def has_grown() -> bool:
        try:
            return _on_remaining_hosts(job, environ=environ).num_ranks > fit.num_ranks
        except (UserError, OSError):  # too few hosts, or an edited experiment: the running job continues
            return False

    has_lost_hosts = fit.num_ranks < job.num_ranks
    # the request may kill a user's script without saving
    should_restart = has_grown if has_lost_hosts and not job.is_python else None
    return _run(fit, environ=environ, should_restart=should_restart, has_lost_hosts=has_lost_hosts)


def _run(
    job: JobSpec,
    *,
    environ: Mapping[str, str],
    should_restart: Callable[[], bool] | None = None,
    leaves: Sequence[Path] = (),
    has_lost_hosts: bool = False,
) -> Ended:
    if job.interface is not None:
        require_interface(job.interface)
    config = try_load_experiment(job)
    folder, heals = config.run.directory if config else None, heals_in_place(job)
    end_seconds = exit_wait_seconds(config.comm.timeout_seconds, heals=heals) if config else None
    name = exit_path(Path.cwd())  # the first of other hosts sees this folder
    with ending_orphans(ASKS_TO_STOP, leaves=(*leaves, name)) as watch, exit_file(name) as path:
        first_rank = FirstRankWatch(folder, launch_id=str(name), end_seconds=end_seconds, heals=heals)
        left_behind = LeftBehind(name, num_ranks=job.num_ranks)
        with_exit_file = replace(job, environment=(*job.environment, *exit_file_variable(path)))
        ended = run_in_foreground(
            _argv_here(with_exit_file, environ=environ),
            environ=dict(environ) | dict(with_exit_file.variables),
            asks_to_stop=ASKS_TO_STOP,
            should_restart=should_restart,
            rank_0_ended=(lambda mpirun: left_behind.look(mpirun) or first_rank()) if path else None,
            watch=watch,
        )
        return with_code_of_first_rank(ended, job, path=path, heals=heals, has_lost_hosts=has_lost_hosts)


def _dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
    preflight = _preflight_line(preflight_of(job), environ=environ) if has_whole_preflight(job) else ""
    if job.hosts and (short := short_preflight_of(job)) is not None:
        preflight = command_line(_argv_here(short, environ=environ), short.variables)
    return preflight + describe_restarts(job) + command_line(_argv_here(job, environ=environ), job.variables)


def _start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
    if has_whole_preflight(job):
        ended, job = _without_unfit(job, environ=environ)
        if ended is not None:
            return ended.code
    elif (code := _short_preflight(job, environ=environ)) is not None:
        return code
    start = partial(_run_until_hosts_return, job=job, environ=environ)
    return run_with_restarts(start, job, refit=partial(_on_remaining_hosts, environ=environ)).code


LAUNCHER = Launcher(
    default_ranks="all slots of --hosts, else 1",
    environment_help=f"all on this host; on --hosts, those that begin with {', '.join(FORWARDED)}",
    example="--hosts n0:8,n1:8 -- train --config imagenet/resnet50_32k",
    refused=REFUSED,
    dry_run=_dry_run,
    start=_start,
    queue=FOREGROUND_QUEUE,
    preflight=run_preflight,
)
