"""Check a job on the host that starts or submits it: its command, experiment and files."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from bigbatch.cli import find_unknown
from bigbatch.errors import ConfigError, JobRefused, LaunchOptionError, nearest, printable, tell
from bigbatch.launch.jobs.findings import Problems
from bigbatch.launch.jobs.run_folder import (
    command_of_first_task,
    find_run_folder,
    load_experiment,
    require_experiment,
    run_argument,
    try_load_experiment,
    tuned_script,
)
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.parts import load
from bigbatch.trainer.config.batch import accumulation_steps, can_share, divide_batch, shares, uneven
from bigbatch.trainer.config.dotted import class_of_root
from bigbatch.trainer.config.moved import require_own_list
from bigbatch.trainer.config.sections import LOADERS, BatchConfig, DataConfig
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.folder.folder import RunDir, load_run_config
from bigbatch.words import count

GPU_SHARING_BACKENDS = ("gloo", "horovod")
"""Backends that do not need a GPU for each rank."""
PREFLIGHT_PARSER = "bigbatch.tools.preflight.options.make_parser"
IMAGE_FILES = (".sif", ".sqsh")

VisibleFiles = Literal["all", "shared", "none"]
"""Which files of this host a job's hosts see: all; those of the work folder, and maybe others; none."""


def check_job(job: JobSpec, findings: Problems, *, starts: bool = True, visible: VisibleFiles = "all") -> None:
    """Collect mistakes in findings; print as warnings those that may not apply on the nodes or in an image.

    An image has its own bigbatch, and a job that is only shown (starts is false) may be for another machine.
    visible: which files of this host the job's hosts see.
    """
    doubts, of_image = Problems(), Problems()
    of_command = findings if job.image is None else of_image
    of_command.attempt(check_command, job)
    of_command.attempt(check_experiment, job)
    if job.restarts:
        of_command.attempt(find_run_folder, job)  # a run that restarts from the beginning each time is refused
    if visible != "none":
        _check_files(job, findings if starts else doubts, doubts=doubts, of_image=of_image, visible=visible)
    of_others = (f"{each} (checked by the bigbatch of this host; the image has its own)" for each in of_image.found)
    for doubt in (*(each for each in doubts.found if each not in findings.found), *of_others):
        tell(f"warning: {printable(doubt)}")


def check_command(job: JobSpec) -> None:
    """Raise LaunchOptionError for an unknown subcommand, a wrong value for preflight, or no script or module."""
    if job.is_python:
        word = job.command[0] if job.command else "-m"
        if word.startswith("-") and (word != "-m" or len(job.command) == 1):
            raise LaunchOptionError(
                f"--python: {' '.join(job.command[:1])!r} is not a script: after --, put a script, or -m and a module, "
                "and then its options"
            )
    elif job.command and (unknown := find_unknown(job.command)):
        raise LaunchOptionError(f"{unknown}{_hint(job.command)}")
    elif job.command[:1] == ("preflight",) and not {"-h", "--help"} & set(job.command):
        parser = load(PREFLIGHT_PARSER)()
        parser.exit_on_error = False
        try:
            parser.parse_known_args(command_of_first_task(job)[1:])
        except argparse.ArgumentError as error:
            if error.argument_name == "--link-gbit":  # a path may hold variables that only the ranks have
                raise LaunchOptionError(f"preflight: {error}") from error


def _hint(command: Sequence[str]) -> str:
    """Return how to write a command that has a word of another launcher, such as python; "" for others."""
    word, rest = command[0], shlex.join(command[1:])
    if re.fullmatch(r"(.*/)?python[\d.]*", word):
        return (
            f"; each rank is started by Python: leave {word} out, and put --python before --, as in --python -- {rest}"
        )
    if re.fullmatch(r"(.*/)?bigbatch", word):
        return f"; leave {word} out, as in -- {rest}"
    return "; for a script of your own, put --python before --" if word.endswith(".py") else ""


def check_experiment(job: JobSpec) -> None:
    """Check the arguments of `train`, and that its batch is divisible and each rank has a GPU if GPUs are stated.

    Raises: ConfigError; JobRefused.
    """
    config = load_experiment(job)
    if config is None:
        return
    with Problems() as findings:
        findings.attempt(_check_ranks, job, config.batch)
        if config.comm.backend not in GPU_SHARING_BACKENDS:
            findings.attempt(_check_gpus, job)


def describe_work(job: JobSpec, *, only_uneven: bool) -> str:
    """Return a line on ranks, batch and unequal shares of `train`; "" for other commands, or equal shares if asked."""
    config = try_load_experiment(job)
    if config is None or not can_share(config.batch, job.num_ranks):
        return ""
    batch, division = config.batch, divide_batch(config.batch, world_size=job.num_ranks)
    if only_uneven and division.used_share == 1:
        return ""
    line = f"global batch {batch.global_batch_size} = {shares(division, batch.microbatch_size)}"
    return f"{line}; {uneven(division)}" if division.used_share < 1 else line


def _check_files(
    job: JobSpec, certain: Problems, *, doubts: Problems, of_image: Problems, visible: VisibleFiles
) -> None:
    """Check that each file exists; if the nodes may have other disks, one outside the work folder is only a warning."""

    def of_path(path: str) -> Problems:
        is_shared = visible == "all" or Path(path).absolute().is_relative_to(Path.cwd())
        return certain if is_shared else doubts

    def of_command(path: str) -> Problems:
        return of_image if job.image else of_path(path)

    for option, path in _container_files(job):
        of_path(path).attempt(_check_exists, path, option=option)
    words, findings = command_of_first_task(job), of_image if job.image else certain
    if not job.is_python:
        config = findings.attempt(load_experiment, job)
        config = config and findings.attempt(require_own_list, config, words[1:])
        if config is not None:
            of_command(config.run.directory).attempt(_check_writable, Path(config.run.directory))
            if job.image is None:
                _check_images(config.data, certain if visible == "all" else doubts, is_here=visible == "all")
        findings.attempt(require_experiment, job)
        if script := certain.attempt(tuned_script, job):
            of_command(script).attempt(_check_exists, script, option="--ddp")
        if run := certain.attempt(run_argument, job):
            # the ranks check what they may import; nothing is imported here
            of_run, trained = of_command(run), RunDir(Path(run))
            config = of_run.attempt(load_run_config, trained, [TRUST], prog="bigbatch launch")
            if config and words[0] == "evaluate" and not any(word.startswith("--data.") for word in words):
                of_run.attempt(require_own_list, config, ["--config", str(trained.config)])
    elif words[:1] == ("-m",):
        # --env may lead the ranks to other modules
        is_known = not job.modules and "PYTHONPATH" not in dict(job.environment)
        (of_image if job.image else certain if is_known else doubts).attempt(_check_module, words[1:])
    elif words and not words[0].startswith("-"):
        (of_image if job.image else of_path(words[0])).attempt(_check_script, Path(words[0]))


def _container_files(job: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield option and path of the image, if it is a file, and of each mount's folder."""
    image = job.image or ""
    if "://" not in image and (image.endswith(IMAGE_FILES) or image.startswith(("/", "./", "../"))):
        yield "--image", image
    yield from (("--mount", mount.partition(":")[0]) for mount in job.mounts)


def require_forwarded(job: JobSpec, environ: Mapping[str, str]) -> None:
    """Raise JobRefused if --env names a variable without a value that is not set here."""
    if missing := [name for name, _ in job.forwarded if name not in environ]:
        raise JobRefused([f"--env {name}: not set in this shell: export it, or state {name}=VALUE" for name in missing])


def _check_ranks(job: JobSpec, batch: BatchConfig) -> None:
    if job.num_ranks < 1:  # they contradict each other, which is reported
        return
    try:
        accumulation_steps(batch, world_size=job.num_ranks)
    except ConfigError as refusal:
        fitting = _largest_fitting(batch, limit=job.num_ranks)
        instead = "" if fitting is None else f"; or start {count(fitting, 'rank')}"
        nodes = f"--nodes {job.num_nodes} with {count(job.ranks_per_node, 'rank')} each are " if job.num_nodes else ""
        raise LaunchOptionError(f"{nodes}{count(job.num_ranks, 'rank')}: {refusal}{instead}") from refusal


def largest_num_ranks(job: JobSpec, *, limit: int) -> int | None:
    """Return the largest number of ranks up to limit that can share the batch; limit for a user's script; None if none.

    Raises: ConfigError.
    """
    config = load_experiment(job)
    return (limit or None) if config is None else _largest_fitting(config.batch, limit=limit)


def fitting_nodes(job: JobSpec) -> tuple[int, ...]:
    """Return the numbers of full nodes that can share the batch, in falling order; any for a user's script.

    Raises: ConfigError.
    """
    config = load_experiment(job)
    counts = range(job.num_nodes or 1, 0, -1)
    return tuple(count for count in counts if config is None or can_share(config.batch, count * job.ranks_per_node))


def _largest_fitting(batch: BatchConfig, *, limit: int) -> int | None:
    most = min(limit, batch.global_batch_size // batch.microbatch_size)
    return next((ranks for ranks in range(most, 0, -1) if can_share(batch, ranks)), None)


def _check_gpus(job: JobSpec) -> None:
    if job.gpus_per_node and job.device is None and job.ranks_per_node > job.gpus_per_node:
        raise LaunchOptionError(
            f"{job.ranks_per_node} ranks on each node need a GPU each, more than --gpus-per-node {job.gpus_per_node}: "
            f"state --ranks-per-node {job.gpus_per_node}, more GPUs, or --device cpu"
        )


def _check_module(words: tuple[str, ...]) -> None:
    for name in words[:1]:
        top = name.partition(".")[0]
        # the ranks also search the work folder; editable installs have their own finder
        others = (finder.find_spec(top, None) for finder in sys.meta_path)
        if PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None and not any(others):
            raise LaunchOptionError(
                f"--python: there is no module {name} on this host: name another module, or a script"
            )


def _check_script(path: Path) -> None:
    if not path.exists():
        near = nearest(path.name, [each.name for each in path.parent.glob("*.py")])
        hint = f"; the nearest is {path.with_name(near)}" if near else ""
        raise LaunchOptionError(f"--python: there is no script {path} on this host{hint}")


def _check_writable(folder: Path) -> None:
    """Check that the nearest existing folder is writable, except /: the nodes may mount another one below it."""
    path = folder.absolute()
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    if there != Path(there.anchor) and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        reason = "you may not write there" if there.is_dir() else "it is not a folder"
        raise LaunchOptionError(f"--run.directory {folder}: {there}: {reason}; name another folder")


def _check_images(data: DataConfig, findings: Problems, *, is_here: bool) -> None:
    """Collect a missing data.root and data.list in findings; is_here: also of absolute paths."""
    is_path = ":/" not in data.root and not class_of_root(data.root)  # Path makes one slash of two
    if is_path and data.loader in LOADERS and data.loader != "synthetic":
        makes = "; bigbatch data generate and data prepare make a folder of images, bigbatch init a list of yours"
        for option, path in (("--data.root", data.root), ("--data.list", data.list)):
            if path and (is_here or not os.path.isabs(path)):
                findings.attempt(_check_exists, path, option=option, hint=makes)


def _check_exists(path: str, *, option: str, hint: str = "") -> None:
    if not os.path.exists(path):
        raise LaunchOptionError(f"{option} {path}: there is no such file or folder on this host{hint}")
