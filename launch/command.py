"""`bigbatch launch`: start a bigbatch command on several ranks."""

import argparse
import os
import shlex
from collections.abc import Sequence

from bigbatch.comm.environ import terminal_columns
from bigbatch.launch import mpirun, torchrun
from bigbatch.launch.emulate import command as emulate
from bigbatch.launch.installed import find_mpirun
from bigbatch.launch.job import JobSpec, make_job, parse_hosts
from bigbatch.launch.local import run_in_foreground


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `bigbatch launch`; the job's exit code."""
    words = list(argv)
    if words[:1] == ["emulate"]:
        return emulate.main(words[1:], environ=os.environ)
    split = words.index("--") if "--" in words else len(words)
    arguments, command = _parser().parse_args(words[:split]), tuple(words[split + 1 :])
    hosts = parse_hosts(arguments.hosts) if arguments.hosts else ()
    job = make_job(command, num_ranks=arguments.ranks, hosts=hosts, num_cores=os.cpu_count() or 1)
    is_mpirun = arguments.launcher == "mpirun"
    job_argv = _mpirun(job) if is_mpirun else torchrun.torchrun_argv(job)
    if arguments.dry_run:
        print(shlex.join(job_argv))
        return 0
    asks_to_stop = mpirun.ASKS_TO_STOP if is_mpirun else torchrun.ASKS_TO_STOP
    return run_in_foreground(job_argv, environ=os.environ, asks_to_stop=asks_to_stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch launch",
        usage="bigbatch launch {mpirun,torchrun} [--ranks N] [--hosts HOSTS] [--dry-run] -- COMMAND [OPTION ...]\n"
        "       bigbatch launch emulate {up,run,shape,status,down} [OPTION ...]",
        description="Start a bigbatch command on several ranks and wait for it. The first Ctrl-C saves a checkpoint "
        "and stops the job, the second one ends it at once. In a Slurm job: srun bigbatch train --config NAME. "
        "A cluster in a box: bigbatch launch emulate --help",
        epilog="example: bigbatch launch mpirun --ranks 2 -- train --config quickstart",
    )
    parser.add_argument("launcher", choices=("mpirun", "torchrun"), help="what starts the ranks")
    parser.add_argument("--ranks", type=int, help="number of ranks (default: all slots of --hosts, else 1)")
    parser.add_argument("--hosts", help="hosts and their ranks, such as n0:8,n1:8 (default: this host)")
    parser.add_argument("--dry-run", action="store_true", help="print the command line instead of running it")
    return parser


def _mpirun(job: JobSpec) -> list[str]:
    return mpirun.mpirun_argv(
        job,
        mpirun=find_mpirun(),
        is_root=os.geteuid() == 0,
        terminal_columns=terminal_columns() or 0,
        variables=os.environ,
    )
