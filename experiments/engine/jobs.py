"""Build and check the launcher's job of a point or of an array of points, and the command line that starts it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bigbatch.errors import LaunchOptionError
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.engine.plan import SweepPlan
from bigbatch.experiments.engine.points import ONE_HOST, Point
from bigbatch.interpreter import bigbatch_argv
from bigbatch.launch.jobs.check import check_job
from bigbatch.launch.jobs.findings import Problems
from bigbatch.launch.jobs.options import option_words, read_job, read_options
from bigbatch.launch.jobs.site import apply_site
from bigbatch.launch.jobs.spec import INDEX, JOB_OPTIONS, OPTIONS, JobSpec
from bigbatch.launch.launchers.registry import load_launcher
from bigbatch.launch.launchers.slurm import job_script
from bigbatch.tools.emulate import launchers as emulated
from bigbatch.tools.emulate.plan import DEFAULT_NAME, make_plan
from bigbatch.tools.emulate.state import state_root


def point_command(plan: SweepPlan, point: Point, folder: SweepFolder) -> list[str]:
    """Return the command that runs a point as a child process, so that its failure does not end the sweep."""
    launcher = ("emulate", "run") if plan.where == "emulated" else (plan.where,)
    words = [*stated_words(_size(plan, point)), *option_words(plan.launch)]
    return [*bigbatch_argv(), "launch", *launcher, *words, *_command(plan, folder, point.number)]


def arrays(points: Sequence[Point]) -> dict[int, list[Point]]:
    """Group points by their number of ranks, fewest first: each group can be one Slurm array."""
    found: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.ranks, point.number)):
        found.setdefault(point.ranks, []).append(point)
    return found


def array_job(plan: SweepPlan, points: Sequence[Point], folder: SweepFolder, *, name: str) -> JobSpec:
    """Return the Slurm array that runs these points, of one number of ranks; timeout_minutes is its time limit.

    Raises: LaunchOptionError.
    """
    stated = _array_options(plan, points, folder, name=name) | plan.launch
    return _job(stated, plan, rank_words(plan, folder, INDEX))


def array_words(plan: SweepPlan, points: Sequence[Point], folder: SweepFolder, *, name: str) -> list[str]:
    """Return the words of `bigbatch launch` that submit the same job, for the user."""
    own = stated_words(_array_options(plan, points, folder, name=name))
    return ["slurm", *own, *option_words(plan.launch), *_command(plan, folder, INDEX)]


def rank_words(plan: SweepPlan, folder: SweepFolder, number: int | str) -> tuple[str, ...]:
    """Return the command of each rank; number: the point's, or INDEX for all points of an array."""
    return (*(("train",) if plan.script is None else plan.script), "--config", str(folder.config(number)))


def stated_words(options: Mapping[str, object]) -> list[str]:
    """Write {'stop_seconds': 0} -> --stop-seconds 0."""
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]


def _command(plan: SweepPlan, folder: SweepFolder, number: int | str) -> list[str]:
    return [*(() if plan.script is None else ("--python",)), "--", *rank_words(plan, folder, number)]


def _size(plan: SweepPlan, point: Point) -> dict[str, Any]:
    if plan.where in ONE_HOST:
        return {"ranks": point.ranks}
    return {"nodes": point.nodes, "ranks_per_node": point.ranks_per_node}


def _array_options(plan: SweepPlan, points: Sequence[Point], folder: SweepFolder, *, name: str) -> dict[str, Any]:
    array = ",".join(str(point.number) for point in points)
    own = {"array": array, "name": name, "logs": folder.logs, "stop_seconds": 0}
    limit = plan.timeout_minutes
    time = {} if "time" in plan.launch or limit is None else {"time": math.ceil(limit)}
    return _size(plan, points[0]) | own | time


def _job(options: Mapping[str, Any], plan: SweepPlan, command: Sequence[str]) -> JobSpec:
    with Problems() as findings:
        stated = read_options(options, JOB_OPTIONS)
        apply_site(stated, refused=load_launcher(plan.where).refused)
        return read_job(stated, command, findings=findings, is_python=plan.script is not None)


def check_launch(plan: SweepPlan, points: Sequence[Point], folder: SweepFolder) -> None:
    """Check the launch options, before anything is written: build the job of each number of ranks, and discard it.

    Raises: LaunchOptionError; EmulationError if others can reach the folder of this user's clusters.
    """
    if plan.where == "slurm":
        try:
            OPTIONS["logs"].checked(str(folder.logs))
        except LaunchOptionError as error:
            raise LaunchOptionError(
                f"--folder {str(folder.path)!r}: Slurm accepts paths of letters, digits and . _ / + @ = : - only"
            ) from error
    for same in arrays(points).values():
        try:
            _check(plan, same, folder)
        except LaunchOptionError as error:
            raise LaunchOptionError(f"launch: {error}") from error
    if plan.where == "emulated":
        state_root()  # otherwise each point would fail for this reason


def _check(plan: SweepPlan, points: Sequence[Point], folder: SweepFolder) -> None:
    first = points[0]
    command = rank_words(plan, folder, first.number)
    if plan.where == "slurm":
        job = array_job(plan, points, folder, name=plan.name)
        job_script(job, folder=None)  # the experiments are written later
    elif plan.where == "emulated":
        job = JobSpec(command, first.ranks, is_python=plan.script is not None)
        options = read_options(plan.launch, emulated.RUN_OPTIONS)
        nodes = make_plan(
            name=DEFAULT_NAME,
            nodes=first.nodes,
            ranks_per_node=str(first.ranks_per_node),
            link=options.link,
            delay=options.delay,
        )
        make_processes, _ = emulated.NODE_LAUNCHERS[options.launcher]
        make_processes(job, nodes, emulated.StartContext(order=options.place))
    else:
        job = _job(_size(plan, first) | plan.launch, plan, command)
        load_launcher(plan.where).dry_run(job, {})
    if job.is_python:
        with Problems() as findings:
            check_job(job, findings, visible="shared" if plan.where == "slurm" else "all")
