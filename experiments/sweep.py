"""`bigbatch sweep`: run the pending points of a sweep, and compare the results."""

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import (
    INTERRUPTED,
    SOME_FAILED,
    ConfigError,
    LaunchOptionError,
    or_nearest,
    print_line,
    print_lines,
    tell,
)
from bigbatch.experiments.engine.engine import Interrupted, remove_points, require_idle, run_points, start_over
from bigbatch.experiments.engine.folder import FAILED, PENDING, SUBMITTED, SweepFolder
from bigbatch.experiments.engine.growth import Growth, grow
from bigbatch.experiments.engine.images import require_images
from bigbatch.experiments.engine.jobs import array_job, array_words, arrays, check_launch, point_command
from bigbatch.experiments.engine.plan import CASE, PLACES, SweepPlan, packaged_sweeps, read_plan
from bigbatch.experiments.engine.points import Point, make_points
from bigbatch.experiments.engine.slurm import find_submitted, submit_points, wait_for_points
from bigbatch.experiments.inference import measure
from bigbatch.experiments.predicted import Predictions, cores_of, predict, require_predictable
from bigbatch.experiments.report.predictions import write_predictions
from bigbatch.experiments.report.publish import report_on
from bigbatch.experiments.report.show import ProgressDisplay, outcome, print_table
from bigbatch.experiments.search.cases import CaseSearch, describe_searches, make_searches, run_searches, tuned_values
from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.launch.launchers.slurm import job_script
from bigbatch.launch.tables import show_table, stdout_console
from bigbatch.paths import as_path, expand_path
from bigbatch.trainer.config.file import PACKAGED, parse_overrides
from bigbatch.trainer.config.options import parse_beside_keys
from bigbatch.user_settings import visible_gpus
from bigbatch.words import count, whole


def main(argv: Sequence[str]) -> int:
    """Run the pending points; return 0 if all are done, 3 if some failed, 130 if the user stopped it."""
    arguments, words = parse_beside_keys(_parser(), argv)
    plan, path = _read(arguments, words)
    folder = SweepFolder(path)
    searches = make_searches(plan, folder, parallel=arguments.parallel) if plan.search else []
    selection = _select(plan, folder, searches, arguments)
    check_launch(plan, selection.made, folder)
    if arguments.predict is not None:
        require_predictable(selection.growth.points, cluster=arguments.predict)
    probes = [probe for each in searches if each.result is None for probe in each.probes]
    require_images(plan, [*selection.to_run, *probes], starts=not arguments.dry_run)
    if arguments.dry_run:
        print_table(plan, folder, selection.chosen, selection.growth)
        if arguments.predict is not None:
            show_table(_predict(plan, selection.chosen, folder, cluster=arguments.predict).table(), stdout_console())
        for line in describe_searches(searches, selection.growth.points) if searches else ():
            print_line(line)
        _print_commands(plan, selection.to_run, folder)
        return 0
    with folder.locked():
        if grow(plan, selection.made, folder) != selection.growth:
            raise LaunchOptionError(f"another command has changed {folder.path} in this moment: repeat this one")
        if searches:
            if not folder.sweep.exists():  # from here on the folder is this sweep's
                folder.prepare(plan, [])
            # a point whose search failed has failed: if the range has changed, it is searched again
            wanted = [*selection.to_run, *(each for each in selection.chosen if each.awaits_search)]
            try:
                searches = run_searches(searches, [point.values for point in wanted], folder.path)
            except (Interrupted, KeyboardInterrupt):
                tell("stopped; the same command continues the search")
                return INTERRUPTED
            selection = _select(plan, folder, searches, arguments)
        growth, points, chosen = selection.growth, selection.growth.points, selection.chosen
        for line in growth.describe():
            print_line(line)
        for number in growth.gone if arguments.prune else ():
            _require_not_queued(folder, number, option="--prune")
        folder.prepare(plan, points, gone=growth.gone)
        if arguments.prune:
            remove_points(folder, growth.gone)
        find_submitted(chosen, folder)
        for point in selection.again:
            _require_not_queued(folder, point.number, option="--again")
        require_idle(folder, [point.number for point in selection.again])
        for point in selection.again:
            start_over(folder, point.number)
            folder.change_state(point.number, state=PENDING, reason=None)
        for point in chosen:
            if point.awaits_search:  # all of its trials failed
                failed = next(each.result for each in searches if each.result and each.values == point.values)
                again = f"change its range, or remove {folder.path / failed.folder}"
                folder.change_state(point.number, state=FAILED, reason=f"search: {failed.describe()}; {again}")
            elif searches and folder.state_of(point.number) == FAILED and not folder.config(point.number).exists():
                folder.change_state(point.number, state=PENDING, reason=None)  # its search failed, but not this time
        pending = [
            each for each in folder.to_run(chosen, retry_failed=arguments.retry_failed) if not each.awaits_search
        ]
        submitted = _in_queue(folder, chosen)
        print_line(
            f"{folder.path}: {count(len(points), 'point')}, {len(pending)} to run"
            + (f", {len(submitted)} in Slurm's queue" if submitted else "")
        )
        to_come = pending
        if plan.where == "slurm":
            submit_points(plan, pending, folder)
            for point in pending:  # Slurm may refuse some
                if folder.state_of(point.number) == FAILED:
                    result = outcome(folder, folder.read_state(point.number))
                    print_line(f"point {point.number} ({point.describe()}): {result}")
            to_come = submitted + _in_queue(folder, pending)
        return _run(plan, to_come, folder, chosen=chosen, points=points, arguments=arguments)


@dataclass(frozen=True)
class _Selection:
    """The points of a command."""

    made: list[Point]
    growth: Growth
    again: list[Point]
    chosen: Sequence[Point]
    to_run: list[Point]


def _select(
    plan: SweepPlan, folder: SweepFolder, searches: Sequence[CaseSearch], arguments: argparse.Namespace
) -> _Selection:
    """Make all points, and choose those that the options name. Raises: ConfigError; LaunchOptionError."""
    made = make_points(plan, folder=folder.path, tuned=tuned_values(searches))
    growth = grow(plan, made, folder)
    points = growth.points
    again = [] if arguments.again is None else _choose(points, arguments.again, option="--again")
    chosen = again or points if arguments.only is None else _choose(points, arguments.only, option="--only")
    numbers = {point.number for point in (*again, *folder.to_run(chosen, retry_failed=arguments.retry_failed))}
    return _Selection(made, growth, again, chosen, [point for point in chosen if point.number in numbers])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch sweep",
        usage="bigbatch sweep FILE [OPTION ...] [--section.key=VALUE ...]",
        description="Train every case and every combination of values that a file states, here, on emulated nodes or "
        "by Slurm, and compare them. The same command continues with pending points; a point that fails does not end "
        f"the others. Exit code: 0 when all points are done, {SOME_FAILED} when some failed. Any key of the "
        "experiment can be overridden in all points.",
        epilog="example: bigbatch sweep scaling --dry-run",
        allow_abbrev=False,
    )
    add = parser.add_argument
    kinds = f"a YAML file, a sweep's folder, or the name of a packaged sweep: {', '.join(packaged_sweeps())}"
    add("sweep", type=expand_path, metavar="FILE", help=kinds)
    add("--where", choices=PLACES, help="launcher, instead of the file's; its launch options must fit")
    add("--folder", type=as_path, help="folder of the points and the report (default: runs/sweeps/NAME)")
    add("--seeds", type=whole, metavar="N", help="runs of each combination, instead of the file's number")
    add("--epochs", type=whole, metavar="N", help="epochs of each point, instead of the file's; schedules scale")
    add("--only", metavar="N,N-N,CASE", help="points to run: numbers, or names of cases (default: all)")
    add("--again", metavar="N,N-N,CASE", help="points to run from their beginning, even if they are done")
    add("--retry-failed", action="store_true", help="run failed points again")
    add("--prune", action="store_true", help="remove the points that a changed file no longer has, with their runs")
    add("--parallel", type=whole, default=1, metavar="N", help="points at once on this host, each on separate GPUs")
    add("--no-wait", dest="wait", action="store_false", help="Slurm: submit, and do not wait for the end")
    add("--predict", type=expand_path, metavar="CLUSTER", help="add the simulator's prediction for each point")
    add("--dry-run", action="store_true", help="print the points and the commands that would run")
    return parser


def _read(arguments: argparse.Namespace, words: Sequence[str]) -> tuple[SweepPlan, Path]:
    """Return the plan and its folder. Raises: ConfigError."""
    path, folder, known = Path(arguments.sweep), arguments.folder, packaged_sweeps()
    if path.is_dir() and (path / "sweep.yaml").is_file():
        path, folder = path / "sweep.yaml", folder or path
    elif not path.is_file():
        if arguments.sweep not in known:
            near = or_nearest(arguments.sweep, known, words="the nearest packaged one is")
            packaged = f"packaged are {', '.join(sorted(known))}"
            raise ConfigError(f"{arguments.sweep}: no such file, folder of a sweep or packaged sweep{near}; {packaged}")
        path = PACKAGED / "sweeps" / f"{arguments.sweep}.yaml"
    options = parse_overrides(words, prog="bigbatch sweep")
    replaced = {name: value for name in ("where", "seeds", "epochs") if (value := getattr(arguments, name)) is not None}
    plan = read_plan(path, replaced=replaced | ({"options": options} if options else {}))
    for key in options:
        if case := next((name for name, own in plan.cases.items() if key in own), None):
            raise ConfigError(f"--{key} is also in case {case}: keep one")
    if arguments.parallel < 1 or (arguments.parallel > 1 and (plan.where == "slurm" or plan.steps is not None)):
        raise ConfigError(
            f"--parallel {arguments.parallel} must be at least 1, and 1 in Slurm or with steps: leave it out"
        )
    return plan, folder or plan.folder


def _choose(points: Sequence[Point], text: str, *, option: str) -> list[Point]:
    """Return the points that a text such as '0,3-5,lars' names. Raises: LaunchOptionError."""
    cases = list(dict.fromkeys(point.values[CASE] for point in points if CASE in point.values))
    numbers: set[int] = set()
    for part in text.split(","):
        if part in cases:
            numbers |= {point.number for point in points if point.values.get(CASE) == part}
            continue
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if not match:
            near = or_nearest(part, cases)
            raise LaunchOptionError(f"{option} {part!r} must be a number, a range or a case, such as 0,3-5{near}")
        first, last = int(match[1]), int(match[2] or match[1])
        named = {point.number for point in points if first <= point.number <= last}
        if not named or last > max(point.number for point in points):
            raise LaunchOptionError(f"{option} {text}: there is no point {part}; --dry-run lists the points")
        numbers |= named
    return [point for point in points if point.number in numbers]


def _require_not_queued(folder: SweepFolder, number: int, *, option: str) -> None:
    if folder.state_of(number) == SUBMITTED:
        raise LaunchOptionError(f"{option} {number}: it is in Slurm's queue: wait for it, or scancel it")


def _print_commands(plan: SweepPlan, points: Sequence[Point], folder: SweepFolder) -> None:
    if not points:
        print_line("nothing would run")
    if plan.where != "slurm":
        for point in points:
            print_line(f"point {point.number}: {shlex.join(point_command(plan, point, folder))}")
        return
    for same in (jobs := list(arrays(points).values())):
        print_line(f"# bigbatch launch {shlex.join(array_words(plan, same, folder, name=plan.name))}")
    if jobs:
        print_line("# the script of the last one; those of the others differ in nodes, ranks and points")
        print_lines(job_script(array_job(plan, jobs[-1], folder, name=plan.name), folder=None))


def _run(
    plan: SweepPlan,
    to_come: Sequence[Point],
    folder: SweepFolder,
    *,
    chosen: Sequence[Point],
    points: Sequence[Point],
    arguments: argparse.Namespace,
) -> int:
    show = ProgressDisplay(folder, num_points=len(to_come))
    try:
        if plan.where == "slurm":
            wait_for_points(to_come, folder, waits=arguments.wait, on_end=show.end)
        else:
            gpus = visible_gpus(count_gpus()) if arguments.parallel > 1 else []
            run_points(plan, to_come, folder, on_end=show.end, parallel=arguments.parallel, gpus=gpus)
        inference = measure(plan, points, folder)
    except (Interrupted, KeyboardInterrupt):
        still = _in_queue(folder, chosen)
        what = f"; {_queued(folder, still)}" if still else ", and no point runs"
        tell(f"stopped{what}; the same command runs the pending points")
        return INTERRUPTED
    states = [folder.state_of(point.number) for point in chosen]
    more = list(inference.tables) if inference else []
    if arguments.predict is not None:
        predictions = _predict(plan, points, folder, cluster=arguments.predict)
        write_predictions(folder.path, predictions.rates, cluster=arguments.predict)
        more.append(predictions.table())
    if any(state != PENDING for state in states):
        report_on([folder.path], more=more)
    failed = states.count(FAILED)
    if failed:
        print_line(
            f"{failed} of {len(states)} points failed; their output is in {folder.path}/points/N/log.txt; "
            "--retry-failed runs them again"
        )
    if still := _in_queue(folder, chosen):
        print_line(f"{_queued(folder, still)}; the same command collects their results")
    return SOME_FAILED if failed or (inference and inference.undone) else 0


def _predict(plan: SweepPlan, points: Sequence[Point], folder: SweepFolder, *, cluster: str) -> Predictions:
    return predict(points, folder, cluster=cluster, cores=cores_of(plan))


def _in_queue(folder: SweepFolder, points: Sequence[Point]) -> list[Point]:
    return [point for point in points if folder.state_of(point.number) == SUBMITTED]


def _queued(folder: SweepFolder, points: Sequence[Point]) -> str:
    jobs = sorted({str(folder.read_state(point.number)["job"]) for point in points})
    number = "1 point is" if len(points) == 1 else f"{len(points)} points are"
    return f"{number} in Slurm's queue (scancel {' '.join(jobs)} would end them)"
