"""Check that a launcher accepts a sweep's launch options, before anything is written or started."""

from collections.abc import Sequence

from bigbatch.errors import LaunchOptionError
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.engine.jobs import array_job, arrays, point_job, rank_words
from bigbatch.experiments.engine.plan import Plan
from bigbatch.experiments.engine.points import Point
from bigbatch.launch.emulate import launchers as emulated
from bigbatch.launch.emulate.plan import DEFAULT_NAME, make_plan
from bigbatch.launch.emulate.state import state_root
from bigbatch.launch.jobs.check import check_job
from bigbatch.launch.jobs.findings import Findings
from bigbatch.launch.jobs.options import read_options
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.jobs.words import check_words
from bigbatch.launch.launchers.registry import LAUNCHERS
from bigbatch.launch.launchers.slurm import job_script


def check_launch(plan: Plan, points: Sequence[Point], folder: SweepFolder) -> None:
    """Build the job of each number of ranks, and discard it.

    Raises: LaunchOptionError; EmulationError if others can reach the folder of this user's clusters.
    """
    if plan.where == "slurm":
        try:
            check_words("logs", str(folder.logs))
        except LaunchOptionError as error:
            raise LaunchOptionError(
                f"--folder {str(folder.path)!r}: Slurm's scripts take letters, digits and . _ / + @ = : - alone"
            ) from error
    for same in arrays(points).values():
        try:
            _check(plan, same, folder)
        except LaunchOptionError as error:
            raise LaunchOptionError(f"launch: {error}") from error
    if plan.where == "emulated":
        state_root()  # else each point would fail by it


def _check(plan: Plan, points: Sequence[Point], folder: SweepFolder) -> None:
    first = points[0]
    if plan.where == "slurm":
        job = array_job(plan, points, folder, name=plan.name)
        job_script(job, folder=None)  # the experiments are written later
    elif plan.where == "emulated":
        job = JobSpec(rank_words(plan, folder, first.number), first.ranks, is_python=plan.script is not None)
        _check_emulated(plan, first, job)
    else:
        job = point_job(plan, first, folder)
        LAUNCHERS[plan.where].dry_run(job, {})
    if job.is_python:
        with Findings() as findings:
            check_job(job, findings, sees="shared" if plan.where == "slurm" else "all")


def _check_emulated(plan: Plan, point: Point, spec: JobSpec) -> None:
    options = read_options(plan.launch, emulated.RUN_OPTIONS)
    nodes = make_plan(
        name=DEFAULT_NAME,
        nodes=point.nodes,
        ranks_per_node=str(point.ranks_per_node),
        link=options.link,
        delay=options.delay,
    )
    job = emulated.Job(spec.command, spec.is_python)
    emulated.NODE_LAUNCHERS[options.launcher].starts(job, nodes, emulated.Site(order=options.place))
