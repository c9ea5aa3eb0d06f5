"""`bigbatch launch`: start a bigbatch command on several ranks, here or by a scheduler."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bigbatch.comm.rendezvous.environ import terminal_columns
from bigbatch.errors import ConfigError, SlurmError
from bigbatch.launch.emulate import subcommands as emulate
from bigbatch.launch.jobs.fit_hosts import choose_launcher, preflight_command, read_bad_nodes, without, write_hostfile
from bigbatch.launch.jobs.foreground import Ended, run_in_foreground
from bigbatch.launch.jobs.installed import count_gpus, find_mpirun, require_interface
from bigbatch.launch.jobs.options import job_options, read_job
from bigbatch.launch.jobs.run_folder import find_run_folder
from bigbatch.launch.jobs.spec import JobSpec, interface_variables
from bigbatch.launch.launchers import k8s, mpirun, slurm_queue, torchrun
from bigbatch.launch.launchers.slurm import log_path, sbatch_script
from bigbatch.trainer.preflight import UNFIT
from bigbatch.trainer.run.folder import writing

EXAMPLE = "train --config imagenet/resnet50_32k"
LAUNCHERS = {
    # launcher: (what it does, ranks where none are stated, example)
    "local": (
        "start ranks on this host, without MPI",
        "one per GPU, or 1",
        f"bigbatch launch local -- {EXAMPLE}",
    ),
    "mpirun": (
        "start ranks by Open MPI's mpirun",
        "all slots of --hosts, else 1",
        f"bigbatch launch mpirun --hosts n0:8,n1:8 -- {EXAMPLE}",
    ),
    "torchrun": (
        "start this host's ranks by torchrun; with --nodes, on each host",
        "1",
        f"bigbatch launch torchrun --nodes 2 --ranks-per-node 8 --node-rank 0 --master n0:29500 -- {EXAMPLE}",
    ),
    "slurm": (
        "submit a job, which saves a checkpoint before its time limit and goes on from there",
        "--nodes times --ranks-per-node",
        f"bigbatch launch slurm --nodes 4 --ranks-per-node 8 --gpus-per-node 8 --time 2:00:00 -- {EXAMPLE}",
    ),
    "k8s": (
        "submit an MPIJob to Kubernetes",
        "--nodes times --ranks-per-node",
        f"bigbatch launch k8s --nodes 4 --ranks-per-node 8 --image registry/bigbatch -- {EXAMPLE}",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `bigbatch launch`; the job's exit code, or 0 for one that was submitted."""
    words = list(argv)
    if words[:1] == ["emulate"]:
        return emulate.main(words[1:], environ=os.environ)
    arguments, command = _parse(words)
    if arguments.launcher == "status":
        return _status(arguments.jobs)
    if arguments.launcher == "cancel":
        return _cancel(arguments.jobs, now=arguments.now)
    if arguments.launcher == "preflight":
        return _preflight(arguments, command)
    job = _read_job(arguments, command)
    if arguments.launcher == "slurm":
        return _slurm(job, arguments)
    if arguments.launcher == "k8s":
        return _k8s(job, dry_run=arguments.dry_run)
    return _foreground(job, arguments.launcher, dry_run=arguments.dry_run).code


def slurm_job(words: Sequence[str]) -> JobSpec:
    """What `bigbatch launch` would submit for these words. Raises: ConfigError."""
    return _read_job(*_parse(words))


def submit_job(job: JobSpec, *, wait: bool = False) -> "tuple[str, subprocess.Popen[bytes]]":
    """To Slurm; the job's number, and sbatch, which with wait ends with the job and its exit code.

    Raises: SlurmError with Slurm's words; ConfigError.
    """
    script = job_script(job, folder=find_run_folder(job))
    folder = Path(job.logs or "logs")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return slurm_queue.submit(script, wait=wait, environ=os.environ)


def job_script(job: JobSpec, *, folder: str | None) -> str:
    """The sbatch script of a job that starts this Python's bigbatch, or its image's. Raises: ConfigError."""
    program = ("bigbatch",) if job.image else (sys.executable, "-m", "bigbatch")
    return sbatch_script(job, program=program, folder=folder)


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    split = list(words).index("--") if "--" in words else len(words)
    return _parser().parse_args(words[:split]), tuple(words[split + 1 :])


def _read_job(arguments: argparse.Namespace, command: tuple[str, ...]) -> JobSpec:
    default_ranks = (count_gpus() or 1) if arguments.launcher == "local" and arguments.ranks is None else 1
    return read_job(arguments, command, num_cores=os.cpu_count() or 1, default_ranks=default_ranks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch launch",
        description="Start a bigbatch command on several ranks. Here, the first Ctrl-C saves a checkpoint and stops "
        "the job, the second one ends it at once. A cluster in a box: bigbatch launch emulate --help",
        epilog="example: bigbatch launch mpirun --ranks 2 -- train --config quickstart",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="launcher", required=True, metavar="LAUNCHER")
    options = job_options()
    for name, (text, ranks, example) in LAUNCHERS.items():
        launcher = actions.add_parser(
            name,
            parents=[options],
            allow_abbrev=False,
            usage=f"bigbatch launch {name} [OPTION ...] -- COMMAND [OPTION ...]",
            help=text,
            description=f"{text[0].upper()}{text[1:]}. Ranks where none are stated: {ranks}. "
            "An option that it cannot honour is refused.",
            epilog=f"example: {example}",
        )
        if name == "slurm":
            launcher.add_argument(
                "--output", type=Path, metavar="FILE", help="write the script there; do not submit it"
            )
            launcher.add_argument("--wait", action="store_true", help="until the job has ended, with its exit code")
    checks = actions.add_parser(
        "preflight",
        parents=[options],
        allow_abbrev=False,
        usage="bigbatch launch preflight [OPTION ...] [-- train --config EXPERIMENT]",
        help="compare the nodes of a job before it: versions, disks, pictures, speed, links",
        description="Compares nodes in less than half a minute: by a job in Slurm where --nodes or anything else is "
        "asked of it, else by mpirun on --hosts, or on this host. With a command behind --, its experiment's folders "
        f"and pictures, too. Exit code {UNFIT} where something is wrong.",
        epilog="example: bigbatch launch preflight --hosts n0:8,n1:8 -- train --config imagenet/resnet50_8k",
    )
    checks.add_argument("--good-hosts", type=Path, metavar="FILE", help="mpirun: write a hostfile of the fit ones")
    checks.add_argument("--json", metavar="FILE", help="write all that was found there")
    status = actions.add_parser("status", help="state of jobs in Slurm, and the last report of their runs")
    status.add_argument("jobs", nargs="*", metavar="JOB", help="number (default: all of yours)")
    cancel = actions.add_parser("cancel", help="ask a job in Slurm to save a checkpoint and stop")
    cancel.add_argument("jobs", nargs="+", metavar="JOB", help="number")
    cancel.add_argument("--now", action="store_true", help="end it at once, without a checkpoint")
    actions.add_parser("emulate", add_help=False, help="a cluster in a box: nodes and links on this machine")
    return parser


def _preflight(arguments: argparse.Namespace, command: tuple[str, ...]) -> int:
    if arguments.preflight is not None:
        raise ConfigError(
            "--preflight: bigbatch launch preflight only looks: give it to the launcher that trains, such as bigbatch "
            f"launch slurm --preflight {arguments.preflight}"
        )
    options = () if arguments.json is None else ("--json", arguments.json)
    job = _read_job(arguments, preflight_command(command, *options))
    if choose_launcher(job) == "slurm":
        if arguments.good_hosts:
            raise ConfigError("--good-hosts: Slurm chooses the nodes: use --preflight exclude of bigbatch launch slurm")
        return _slurm_preflight(job, dry_run=arguments.dry_run)
    if arguments.good_hosts and not job.hosts:
        raise ConfigError("--good-hosts needs --hosts or --hostfile, of which it writes the fit ones")
    looked, bad = _look(job, dry_run=arguments.dry_run)
    if arguments.good_hosts and looked.code in (0, UNFIT) and not arguments.dry_run:
        write_hostfile(arguments.good_hosts, job.hosts, bad=bad)
        print(f"written: {arguments.good_hosts}")
    return looked.code


def _look(job: JobSpec, *, dry_run: bool) -> tuple[Ended, list[str]]:
    """Run a preflight by mpirun, on all slots of all hosts; how it ended, and the hosts that are unfit."""
    slots = sum(count for _, count in job.hosts)
    bad = Path.cwd() / f".preflight-{os.getpid()}"  # the first of the hosts writes it, and sees this folder as a run's
    command = (*job.command, "--bad-nodes", str(bad))
    looking = replace(job, command=command, num_ranks=slots or job.num_ranks, preflight=None)
    try:
        return _foreground(looking, "mpirun", dry_run=dry_run), read_bad_nodes(bad)
    finally:
        bad.unlink(missing_ok=True)


def _slurm_preflight(job: JobSpec, *, dry_run: bool) -> int:
    """As a job of its own, whose log is shown at its end."""
    if dry_run:
        print(job_script(job, folder=None), end="")
        return 0
    number, sbatch = submit_job(job, wait=True)
    log = Path(log_path(job, job_id=number))
    print(f"job {number} looks at the nodes; its output: {log}", flush=True)
    code = sbatch.wait()
    print(log.read_text(errors="replace") if log.exists() else f"{log} is not there", end="")
    return code


def _without_unfit(job: JobSpec, *, dry_run: bool) -> tuple[Ended | None, JobSpec]:
    """Look first, as --preflight says; how that ended where the job does not start, and the job that does."""
    looking = replace(job, command=preflight_command(job.command))
    looked, bad = _look(looking, dry_run=dry_run)
    if looked.was_asked:
        return replace(looked, code=looked.code or 130), job
    if looked.code == 0 or dry_run or job.preflight == "warn":
        return None, replace(job, preflight=None)
    if job.preflight == "exclude" and bad:
        fit = without(job, bad)
        print(f"bigbatch: starting without {', '.join(bad)}", file=sys.stderr, flush=True)
        return None, replace(fit, preflight=None)
    return looked, job


def _foreground(job: JobSpec, launcher: str, *, dry_run: bool) -> Ended:
    is_mpirun = launcher == "mpirun"
    if is_mpirun and job.preflight is not None:
        ended, job = _without_unfit(job, dry_run=dry_run)
        if ended is not None:
            return ended
    argv = _mpirun(job) if is_mpirun else torchrun.torchrun_argv(job, launcher=launcher)
    stated = {} if is_mpirun else dict((*interface_variables(job.interface), *job.environment))
    if dry_run:
        variables = [f"{name}={value}" for name, value in stated.items()]
        print(shlex.join([*(["env", *variables] if variables else []), *argv]))
        return Ended(0, was_asked=False)
    if is_mpirun and job.interface is not None:
        require_interface(job.interface)
    asks_to_stop = mpirun.ASKS_TO_STOP if is_mpirun else torchrun.ASKS_TO_STOP
    return run_in_foreground(argv, environ={**os.environ, **stated}, asks_to_stop=asks_to_stop)


def _mpirun(job: JobSpec) -> list[str]:
    return mpirun.mpirun_argv(
        job,
        mpirun=find_mpirun(),
        is_root=os.geteuid() == 0,
        terminal_columns=terminal_columns() or 0,
        variables=os.environ,
    )


def _slurm(job: JobSpec, arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        print(job_script(job, folder=find_run_folder(job)), end="")
        return 0
    if arguments.output:
        script = job_script(job, folder=find_run_folder(job))
        with writing(arguments.output):
            arguments.output.write_text(script, errors="surrogateescape")
        return 0
    number, sbatch = submit_job(job, wait=arguments.wait)
    print(f"job {number}; its output: {log_path(job, job_id=number if job.array is None else number + '_*')}")
    print(f"  bigbatch launch status {number}\n  bigbatch launch cancel {number}", flush=True)
    return sbatch.wait()


def _k8s(job: JobSpec, *, dry_run: bool) -> int:
    text = k8s.manifest(job)
    if dry_run:
        print(text, end="")
        return 0
    k8s.apply(text)
    print(text.splitlines()[2].removeprefix("#   "))
    return 0


def _cancel(numbers: Sequence[str], *, now: bool) -> int:
    def cancel(number: str) -> None:
        jobs = slurm_queue.find_jobs(number)
        for job in [job for job in jobs if not job.has_ended] or jobs:  # of an array, some may have ended
            print(slurm_queue.cancel(job, now=now))

    _for_each(numbers, cancel)
    return 0


def _for_each(numbers: Sequence[str], act: Callable[[str], None]) -> None:
    """One that Slurm refuses does not hold up the others. Raises: SlurmError, at the end."""
    refused: dict[str, None] = {}
    for number in numbers:
        try:
            act(number)
        except SlurmError as error:
            refused[str(error)] = None
    if refused:
        raise SlurmError("; ".join(refused))


def _status(numbers: Sequence[str]) -> int:
    def show(number: str) -> None:
        for job in slurm_queue.find_jobs(number):
            print(slurm_queue.describe(job))

    found = numbers or slurm_queue.jobs_of_user()
    _for_each(found, show)
    if not found:
        print("no job of yours waits or runs")
    return 0
