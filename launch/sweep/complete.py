"""`bigbatch sweep`: run what is missing of a sweep."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import LaunchOptionError, print_line, tell
from bigbatch.exit_codes import INTERRUPTED, SOME_FAILED
from bigbatch.launch.launchers.slurm import job_script
from bigbatch.launch.sweep.check import check_launch
from bigbatch.launch.sweep.folder import (
    FAILED,
    SUBMITTED,
    SweepFolder,
    alone_in,
    prepare,
    read_state,
    require_same,
    state_of,
    to_run,
)
from bigbatch.launch.sweep.jobs import array_job, array_words, arrays, point_command
from bigbatch.launch.sweep.plan import PLACES, Sweep, read_sweep
from bigbatch.launch.sweep.points import Point, make_points
from bigbatch.launch.sweep.predicted import predicted_table
from bigbatch.launch.sweep.queueing import find_submitted, submit_points, wait_for_points
from bigbatch.launch.sweep.running import Interrupted, run_points
from bigbatch.launch.sweep.show import Show, outcome, print_table
from bigbatch.launch.tables import show_table, stdout_console
from bigbatch.paths import expand_path
from bigbatch.trainer.config.file import PACKAGED


def main(argv: Sequence[str]) -> int:
    """Run what is missing; return 0 where all points are done, 3 where some failed, 130 where a person stopped it."""
    arguments = _parser().parse_args(argv)
    sweep = _read(arguments)
    folder = SweepFolder(Path(arguments.folder or sweep.folder))
    points = make_points(sweep, folder=folder.path)
    check_launch(sweep, points, folder)
    chosen = _choose(points, arguments.points)
    if arguments.dry_run:
        require_same(folder, sweep, points)
        print_table(folder, chosen)
        _print_predicted(arguments.predict, chosen, folder)
        _print_commands(sweep, to_run(folder, chosen, retry_failed=arguments.retry_failed), folder)
        return 0
    with alone_in(folder):
        prepare(folder, sweep, points)
        find_submitted(chosen, folder)
        missing = to_run(folder, chosen, retry_failed=arguments.retry_failed)
        submitted = _in_queue(folder, chosen)
        print_line(
            f"{folder.path}: {len(points)} points, {len(missing)} to run"
            + (f", {len(submitted)} in Slurm's queue" if submitted else ""),
        )
        if sweep.where == "slurm":
            submitted += _submit(sweep, missing, folder)
        to_come = submitted if sweep.where == "slurm" else missing
        code = _run(sweep, to_come, folder, chosen=chosen, waits=arguments.wait)
        _print_predicted(arguments.predict, chosen, folder)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch sweep",
        description="Train every combination of a sweep's values for some steps, here, on emulated nodes or by Slurm. "
        "The same command goes on with what is missing; a point that fails does not end the others. Exit code: 0 when "
        f"all points are done, {SOME_FAILED} when some failed. What came out: bigbatch report FOLDER.",
        epilog="example: bigbatch sweep configs/sweeps/scaling.yaml --dry-run",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "sweep",
        type=expand_path,
        metavar="FILE",
        help="the sweep, or the name of a packaged one: " + ", ".join(packaged_sweeps()),
    )
    add("--where", choices=PLACES, help="instead of the file's; its launch options must fit")
    add("--folder", type=expand_path, help="for the points (default: runs/sweeps/NAME)")
    add("--points", metavar="N,N-N", help="only these (default: all)")
    add("--retry-failed", action="store_true", help="run failed points again")
    add("--no-wait", dest="wait", action="store_false", help="Slurm: submit, and do not wait for the end")
    add(
        "--predict",
        type=expand_path,
        metavar="CLUSTER",
        help="what `bigbatch simulate` says of each point, beside what was measured",
    )
    add("--dry-run", action="store_true", help="print the points, and what would run of them")
    return parser


def packaged_sweeps() -> list[str]:
    """Return the names of the sweeps that come with bigbatch."""
    return sorted(path.stem for path in (PACKAGED / "sweeps").glob("*.yaml"))


def _read(arguments: argparse.Namespace) -> Sweep:
    path = Path(arguments.sweep)
    if not path.is_file() and arguments.sweep in packaged_sweeps():
        path = PACKAGED / "sweeps" / f"{arguments.sweep}.yaml"
    return read_sweep(path, where=arguments.where)


def _choose(points: Sequence[Point], text: str | None) -> list[Point]:
    """Choose by '0,3-5' those points. Raises: LaunchOptionError."""
    if text is None:
        return list(points)
    numbers = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if not match:
            raise LaunchOptionError(f"--points {text!r} must be numbers and ranges, such as 0,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < len(points):
            raise LaunchOptionError(f"--points {text}: {part} is none of the points; there are 0 to {len(points) - 1}")
        numbers |= set(range(first, last + 1))
    return [point for point in points if point.number in numbers]


def _print_predicted(cluster: str | None, points: Sequence[Point], folder: SweepFolder) -> None:
    if cluster is not None:
        show_table(predicted_table(points, folder, cluster=cluster), stdout_console())


def _print_commands(sweep: Sweep, points: Sequence[Point], folder: SweepFolder) -> None:
    if not points:
        print_line("nothing would run")
    if sweep.where != "slurm":
        for point in points:
            print_line(f"point {point.number}: {shlex.join(point_command(sweep, point, folder))}")
        return
    for same in arrays(points).values():
        print_line(f"# bigbatch launch {shlex.join(array_words(sweep, same, folder, name=sweep.name))}")
        print(job_script(array_job(sweep, same, folder, name=sweep.name), folder=None))


def _submit(sweep: Sweep, points: Sequence[Point], folder: SweepFolder) -> list[Point]:
    """Return those that Slurm took; say why of the others."""
    submit_points(sweep, points, folder)
    for point in points:
        if state_of(folder, point.number) == FAILED:
            said = outcome(folder, read_state(folder, point.number))
            print_line(f"point {point.number} ({point.describe()}): {said}")
    return _in_queue(folder, points)


def _run(sweep: Sweep, to_come: Sequence[Point], folder: SweepFolder, *, chosen: Sequence[Point], waits: bool) -> int:
    show = Show(folder, num_points=len(to_come), is_terminal=sys.stdout.isatty())
    try:
        if sweep.where == "slurm":
            wait_for_points(to_come, folder, waits=waits, on_end=show.end)
        else:
            run_points(sweep, to_come, folder, on_end=show.end)
    except (Interrupted, KeyboardInterrupt):
        still = _in_queue(folder, chosen)
        what = f"; {_queued(folder, still)}, where they go on" if still else ", and nothing of it runs on"
        tell(f"stopped{what}; the same command goes on with what is missing")
        return INTERRUPTED
    finally:
        show.close()
    print_table(folder, chosen)
    states = [state_of(folder, point.number) for point in chosen]
    failed = states.count(FAILED)
    if failed:
        print_line(f"{failed} of {len(states)} points failed; --retry-failed runs them again")
    if still := _in_queue(folder, chosen):
        print_line(f"{_queued(folder, still)}; the same command collects what came out")
    else:
        print_line(f"bigbatch report {shlex.quote(str(folder.path))} says how it scales")
    return SOME_FAILED if failed else 0


def _in_queue(folder: SweepFolder, points: Sequence[Point]) -> list[Point]:
    return [point for point in points if state_of(folder, point.number) == SUBMITTED]


def _queued(folder: SweepFolder, points: Sequence[Point]) -> str:
    jobs = sorted({str(read_state(folder, point.number)["job"]) for point in points})
    number = "1 point is" if len(points) == 1 else f"{len(points)} points are"
    return f"{number} in Slurm's queue (scancel {' '.join(jobs)} would end them)"
