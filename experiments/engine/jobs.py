"""Make a launcher's job from a point or an array of points; and the command line that starts the same job."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.engine.plan import Plan
from bigbatch.experiments.engine.points import ONE_HOST, Point
from bigbatch.interpreter import bigbatch_argv
from bigbatch.launch.jobs.findings import Findings
from bigbatch.launch.jobs.options import JOB_OPTIONS, read_job, read_options
from bigbatch.launch.jobs.site import apply_site
from bigbatch.launch.jobs.spec import INDEX, JobSpec
from bigbatch.launch.launchers.registry import LAUNCHERS


def point_command(plan: Plan, point: Point, folder: SweepFolder) -> list[str]:
    """Return the command that runs a point as a child process, so that its end does not end the plan."""
    launcher = ("emulate", "run") if plan.where == "emulated" else (plan.where,)
    words = [*stated_words(_size(plan, point)), *launch_words(plan.launch)]
    return [*bigbatch_argv(), "launch", *launcher, *words, *_command(plan, folder, point.number)]


def point_job(plan: Plan, point: Point, folder: SweepFolder) -> JobSpec:
    """Return the job of a point in the foreground of this host or others. Raises: LaunchOptionError."""
    return _job(_size(plan, point) | plan.launch, plan, rank_words(plan, folder, point.number))


def arrays(points: Sequence[Point]) -> dict[int, list[Point]]:
    """Group points by their number of ranks, fewest first: each group can be one Slurm array."""
    found: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.ranks, point.number)):
        found.setdefault(point.ranks, []).append(point)
    return found


def array_job(plan: Plan, points: Sequence[Point], folder: SweepFolder, *, name: str) -> JobSpec:
    """Return the job that runs such points under that name; their time limit is the job's.

    Raises: LaunchOptionError.
    """
    stated = _array_options(plan, points, folder, name=name) | plan.launch
    return _job(stated, plan, rank_words(plan, folder, INDEX))


def array_words(plan: Plan, points: Sequence[Point], folder: SweepFolder, *, name: str) -> list[str]:
    """Return the words of `bigbatch launch` that submit the same job, for the user."""
    own = stated_words(_array_options(plan, points, folder, name=name))
    return ["slurm", *own, *launch_words(plan.launch), *_command(plan, folder, INDEX)]


def rank_words(plan: Plan, folder: SweepFolder, number: int | str) -> tuple[str, ...]:
    """Return the command of all ranks; number may stand for each point of an array."""
    return (*(("train",) if plan.script is None else plan.script), "--config", str(folder.config(number)))


def stated_words(options: Mapping[str, object]) -> list[str]:
    """Write {'stop_seconds': 0} -> --stop-seconds 0."""
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]


def launch_words(options: Mapping[str, Any]) -> list[str]:
    """Write {'gpus_per_node': 8, 'env': [a, b]} -> --gpus-per-node=8 --env=a --env=b; true has no value."""
    words = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            words.append(option if each is True else f"{option}={each}")
    return words


def _command(plan: Plan, folder: SweepFolder, number: int | str) -> list[str]:
    return [*(() if plan.script is None else ("--python",)), "--", *rank_words(plan, folder, number)]


def _size(plan: Plan, point: Point) -> dict[str, Any]:
    if plan.where in ONE_HOST:
        return {"ranks": point.ranks}
    return {"nodes": point.nodes, "ranks_per_node": point.ranks_per_node}


def _array_options(plan: Plan, points: Sequence[Point], folder: SweepFolder, *, name: str) -> dict[str, Any]:
    array = ",".join(str(point.number) for point in points)
    own = {"array": array, "name": name, "logs": folder.logs, "stop_seconds": 0}
    limit = plan.timeout_minutes
    time = {} if "time" in plan.launch or limit is None else {"time": math.ceil(limit)}
    return _size(plan, points[0]) | own | time


def _job(options: Mapping[str, Any], plan: Plan, command: Sequence[str]) -> JobSpec:
    with Findings() as findings:
        stated = read_options(options, JOB_OPTIONS)
        apply_site(stated, refused=LAUNCHERS[plan.where].refused)
        return read_job(stated, command, findings=findings, is_python=plan.script is not None)
