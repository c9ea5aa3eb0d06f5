"""`bigbatch launch`: start a bigbatch command on several ranks, here or by a scheduler."""

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bigbatch.comm.rendezvous.environ import without_identity
from bigbatch.errors import UNFIT, JobRefused, LaunchOptionError, or_nearest, tell
from bigbatch.launch.jobs.check import check_job, describe_work, require_forwarded
from bigbatch.launch.jobs.findings import Problems
from bigbatch.launch.jobs.fit_hosts import choose_launcher, preflight_command
from bigbatch.launch.jobs.options import PYTHON_HELP, job_options, read_job
from bigbatch.launch.jobs.site import apply_site
from bigbatch.launch.jobs.spec import JOB_OPTIONS, refuse
from bigbatch.launch.launchers.base import Launcher, Queue
from bigbatch.launch.launchers.registry import ACTIONS, find_launchers, load_launcher
from bigbatch.parts import load
from bigbatch.paths import as_path
from bigbatch.words import positive

EMULATE = "bigbatch.tools.emulate.subcommands.main"
"""Import path of `bigbatch launch emulate`, loaded when a command names it."""

FOREIGN_OPTIONS = {
    **dict.fromkeys(("-n", "-np", "--np", "--ntasks"), "--ranks"),
    **dict.fromkeys(("--nproc-per-node", "--ntasks-per-node"), "--ranks, or --nodes with --ranks-per-node"),
    **dict.fromkeys(("-N", "--nnodes"), "--nodes"),
    **dict.fromkeys(("--gpus", "--gres"), "--gpus-per-node under Slurm and Kubernetes, else --ranks"),
    **dict.fromkeys(("--master-addr", "--master-port"), "--master HOST:PORT"),
    **dict.fromkeys(("-H", "--host"), "--hosts"),
    "-x": "--env",
}
"""Options of torchrun, mpirun and srun, with the equivalents here."""

Run = Callable[[argparse.Namespace, tuple[str, ...]], int]
"""Runs a subcommand with the parsed options and the command after --; returns the exit code."""


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `bigbatch launch`; return the job's exit code, or 0 for a submitted job."""
    words = list(argv)
    if words[:1] == ["emulate"]:
        return int(load(EMULATE)(words[1:], environ=os.environ))
    split = words.index("--") if "--" in words else len(words)
    parser = make_parser(words[0] if words and not words[0].startswith("-") else None)
    arguments, others = parser.parse_known_args(words[:split])
    if others and (here := FOREIGN_OPTIONS.get(name := others[0].partition("=")[0].replace("_", "-"))):
        raise JobRefused([f"{name} is an option of another launcher: use {here}"])
    if others and not others[0].startswith("-") and split == len(words):
        left = list(others)
        # the remaining words are the command
        options = [word for word in words if not (left and word == left[0] and left.pop(0))]
        parser.error(f"-- is missing before the command: bigbatch launch {shlex.join([*options, '--', *others])}")
    if others:
        near = or_nearest(others[0], [option.flag for option in JOB_OPTIONS])
        parser.error(f"unrecognized arguments: {' '.join(others)}{near}")
    run: Run = arguments.run
    return run(arguments, tuple(words[split + 1 :]))


def _start(launcher: Launcher, name: str, arguments: argparse.Namespace, command: tuple[str, ...]) -> int:
    # counting GPUs takes time: only if no number is stated
    default_ranks = launcher.count_ranks() if arguments.ranks is None and arguments.device is None else 1
    with Problems() as findings:
        findings.attempt(_apply_site, arguments, launcher)
        job = read_job(arguments, command, findings=findings, default_ranks=default_ranks, is_python=arguments.python)
        environ = without_identity(keep={name for name, _ in job.forwarded})
        # contradicting numbers give 0 ranks, by which a launcher might divide
        shown = findings.attempt(launcher.dry_run, replace(job, num_ranks=job.num_ranks or 1), environ)
        findings.attempt(refuse, job, launcher=name, refused=launcher.refused)  # for a launcher whose dry_run does not
        if not arguments.dry_run and not getattr(arguments, "output", None) and launcher.visible != "none":
            findings.attempt(require_forwarded, job, os.environ)
        check_job(job, findings, starts=not arguments.dry_run, visible=launcher.visible)
    if work := describe_work(job, only_uneven=not arguments.dry_run):
        tell(work)
    if arguments.dry_run:
        print(shown, end="")
        return 0
    return launcher.start(job, environ=environ, options=arguments)


def _apply_site(arguments: argparse.Namespace, launcher: Launcher) -> None:
    """Apply the settings of site files, and print them. Raises: LaunchOptionError."""
    for line in apply_site(arguments, refused=launcher.refused, table=launcher.site_table):
        tell(line)


def _preflight(arguments: argparse.Namespace, command: tuple[str, ...]) -> int:
    for option in ("preflight", "restarts"):
        if (value := getattr(arguments, option)) is not None:
            raise LaunchOptionError(
                f"--{option}: bigbatch launch preflight only tests nodes: give it to the launcher that trains, such as "
                f"bigbatch launch slurm --{option} {value}"
            )
    stated = {"--json": arguments.json, "--link-gbit": arguments.link_gbit}
    options = [word for flag, value in stated.items() if value is not None for word in (flag, str(value))]
    with Problems() as findings:
        words = preflight_command(command, *options)
        # from the command line only: a partition in a site file does not make this a Slurm job
        launcher = load_launcher(choose_launcher(read_job(arguments, words, findings=findings)))
        findings.attempt(_apply_site, arguments, launcher)
        job = read_job(arguments, words, findings=findings)
        # the preflight may have another number of ranks than the experiment
        check_job(replace(job, command=command, num_ranks=0), findings, starts=not arguments.dry_run, visible="shared")
    assert launcher.preflight is not None, "choose_launcher() names one that has it"
    return launcher.preflight(job, environ=without_identity(), options=arguments)


def _status(arguments: argparse.Namespace, command: tuple[str, ...]) -> int:
    _queue(arguments.launcher).status(arguments.jobs, arguments.json)
    return 0


def _cancel(arguments: argparse.Namespace, command: tuple[str, ...]) -> int:
    _queue(arguments.launcher).cancel(arguments.jobs, arguments.now)
    return 0


def _queue(name: str) -> Queue:
    queue = load_launcher(name).queue
    if isinstance(queue, str):
        raise LaunchOptionError(f"--launcher {name} has no queue: {queue}")
    return queue


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of one subcommand; without it, a parser that lists all, and imports no launcher.

    Raises: UserError if it is no subcommand, or its launcher cannot be loaded.
    """
    parser = argparse.ArgumentParser(
        prog="bigbatch launch",
        description="Start a bigbatch command on several ranks. Here, the first Ctrl-C saves a checkpoint and stops "
        "the job, the second one ends it at once. All mistakes are reported before anything starts, with exit code 2. "
        "Emulated nodes on this machine: bigbatch launch emulate --help",
        epilog="example: bigbatch launch mpirun --ranks 2 -- train --config quickstart",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="LAUNCHER")
    options, (launchers, _, wrong) = job_options(), find_launchers()
    launcher = None if command in (None, *ACTIONS) else load_launcher(command)
    if command is None and wrong:
        tell(*wrong)
    for name, text in launchers.items():
        parser_of_one = actions.add_parser(name, help=text.replace("%", "%%"), parents=[options], allow_abbrev=False)
        if launcher and name == command:
            _describe(parser_of_one, launcher, name=name, text=text)
    checks = actions.add_parser(
        "preflight",
        parents=[options],
        allow_abbrev=False,
        usage="bigbatch launch preflight [OPTION ...] [-- train --config EXPERIMENT]",
        help="compare the nodes of a job before training: versions, disks, images, speed, links",
        description="Compares nodes in less than half a minute: by a Slurm job if --nodes or another request to Slurm "
        "is stated, else by mpirun on --hosts, or on this host. With a command after --, it also checks the "
        f"experiment's folders and images. Exit code {UNFIT} if something is wrong.",
        epilog="example: bigbatch launch preflight --hosts n0:8,n1:8 -- train --config imagenet/resnet50_8k",
    )
    checks.set_defaults(run=_preflight)
    checks.add_argument("--good-hosts", type=as_path, metavar="FILE", help="mpirun: write a hostfile of the fit hosts")
    checks.add_argument("--json", type=as_path, metavar="FILE", help="write all findings to FILE")
    checks.add_argument("--link-gbit", type=positive, metavar="RATE", help="Gbit/s of a node's link, if known")
    status = actions.add_parser("status", help="state of jobs in Slurm, and the last report of their runs")
    status.set_defaults(run=_status)
    status.add_argument("jobs", nargs="*", metavar="JOB", help="number (default: all of yours)")
    status.add_argument("--json", action="store_true", help="print all jobs as one list in JSON")
    cancel = actions.add_parser("cancel", help="ask a job in Slurm to save a checkpoint and stop")
    cancel.set_defaults(run=_cancel)
    cancel.add_argument("jobs", nargs="+", metavar="JOB", help="number")
    cancel.add_argument("--now", action="store_true", help="end it at once, without a checkpoint")
    for each in (status, cancel):
        each.add_argument("--launcher", choices=launchers, default="slurm", help="launcher of the job (default: slurm)")
    actions.add_parser("emulate", add_help=False, help="emulate a cluster: nodes and links on this machine")
    return parser


def _describe(parser: argparse.ArgumentParser, launcher: Launcher, *, name: str, text: str) -> None:
    parser.usage = f"bigbatch launch {name} [OPTION ...] -- COMMAND [OPTION ...]"
    parser.description = (
        f"{text[0].upper()}{text[1:]}. Default number of ranks: {launcher.default_ranks}. Variables of the shell that "
        f"the ranks get: {launcher.environment_help}. They get none in which an enclosing launcher states a rank. "
        "Unsupported options are refused. Options that the command line does not state are taken from bigbatch.toml of "
        "the user or the site, and printed."
    )
    parser.epilog = f"example: bigbatch launch {name} {launcher.example}"
    parser.add_argument("--python", action="store_true", help=PYTHON_HELP)
    launcher.add_options(parser)
    parser.set_defaults(run=partial(_start, launcher, name))
