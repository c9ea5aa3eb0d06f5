"""`bigbatch report`: the results of sweeps and runs in tables, plots and one page."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import LaunchOptionError, Refusals, print_line
from bigbatch.experiments.engine.plan import CASE, RANKS
from bigbatch.experiments.report.collect import RunResults, SweepResults, read_folder
from bigbatch.experiments.report.report import Report
from bigbatch.launch.tables import Table
from bigbatch.paths import as_path
from bigbatch.trainer.config.kinds import is_option
from bigbatch.trainer.config.schema import KEYS, require_known
from bigbatch.words import decimal, is_number


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.target is not None and not 0 < arguments.target <= 1:
        raise LaunchOptionError(f"--target {arguments.target:g} must be a share of right answers, such as 0.759")
    if arguments.price is not None and not 0 < arguments.price < math.inf:
        raise LaunchOptionError(f"--price {arguments.price:g} must be what a GPU costs in an hour, such as 2.50")
    by = () if arguments.by is None else tuple(arguments.by.split(","))
    pivot = () if arguments.pivot is None else tuple(arguments.pivot.split(","))
    if "" in (*by, *pivot):
        raise LaunchOptionError("--by and --pivot have an empty key: name keys, such as optimizer.name")
    if pivot and len({*pivot}) != 2:
        raise LaunchOptionError(f"--pivot {arguments.pivot} must be two keys: of the rows, and of the columns")
    with (refusals := Refusals()).raise_all():
        for where, key in (*(("--by", key) for key in by), *(("--pivot", key) for key in pivot)):
            if not is_option(key):
                require_known(key, known=(*KEYS, RANKS, CASE), where=where, refusals=refusals)
    options = {"output": arguments.output, "target": arguments.target, "price": arguments.price}
    report_on(arguments.folders, **options, by=by, pivot=pivot)
    return 0


def report_on(
    folders: Sequence[Path],
    *,
    output: Path | None = None,
    target: float | None = None,
    price: float | None = None,
    by: tuple[str, ...] = (),
    pivot: tuple[str, ...] = (),
    more: Sequence[Table] = (),
) -> None:
    """Print the report of these folders and write it. Raises: RunFolderError."""
    found: dict[str, Path] = {}
    for path in folders:
        found.setdefault(os.path.realpath(path), path)
    results = [read_folder(path, target=target) for path in found.values()]
    if target is None and (target := common_target(results)) is not None:
        results = [each if each.target == target else read_folder(each.folder, target=target) for each in results]
    report = Report(
        [each for each in results if isinstance(each, SweepResults)],
        [(each, each.to_accuracy(target=target)) for each in results if isinstance(each, RunResults)],
        target=target,
        price=price,
        by=by,
        pivot_keys=pivot,
        more=tuple(more),
    )
    first = Path(os.path.realpath(folders[0]))
    outermost = min((path for path in found if first.is_relative_to(path)), key=len)
    place = folders[0] if len(found) == 1 else Path(os.path.normpath(found[outermost] / ".."))
    folder = output or place / "report"
    report.print()
    names = report.write(folder, within=output or place)
    print_line(f"written into {folder}: {', '.join(names)}")


def common_target(results: Sequence[SweepResults | RunResults]) -> float | None:
    """Return the lowest top-1 that one of these states, else the lowest best one of several; None without any."""
    if (stated := [each.target for each in results if is_number(each.target)]) or len(results) == 1:
        return min(stated, default=None)  # type: ignore[type-var]
    best = [each.to_accuracy(target=None).best for each in results if isinstance(each, RunResults)]
    return min((run.top1 for run in best if run), default=None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch report",
        description="Compare runs: accuracy and loss as mean and standard deviation over seeds, time, images per "
        "second. For sweeps over ranks: efficiency, and the causes of its loss. For runs: time, GPU-hours and energy "
        "to an accuracy.",
        epilog="example: bigbatch report --by optimizer.name runs/sweeps/optimizers",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folders", type=as_path, nargs="+", metavar="FOLDER", help="folder of a sweep or a run")
    add(
        "--output",
        type=as_path,
        metavar="DIR",
        help="folder for its files (default: report, in FOLDER; beside the first of several)",
    )
    add("--by", metavar="KEY,KEY", help="keys to compare all runs by (default: those in which they differ)")
    pivot = "table for a paper, also as CSV and LaTeX: keys of rows and columns; it pools only seeds"
    add("--pivot", metavar="ROW,COLUMN", help=pivot)
    add(
        "--target",
        type=decimal,
        help="top-1 to reach, such as 0.759 (default: the lowest that a folder states, else that all runs reach)",
    )
    add("--price", type=decimal, help="price of a GPU (a rank) for an hour, such as 2.50: adds the cost")
    return parser
