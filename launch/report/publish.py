"""`bigbatch report`: what sweeps and runs came to, in tables, plots and one page."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import LaunchOptionError, RunFolderError, print_line
from bigbatch.launch.report.accuracy import ToAccuracy, to_accuracy
from bigbatch.launch.report.collect import RunResults, SweepResults, read_folder
from bigbatch.launch.report.report import ScalingReport
from bigbatch.launch.sweep.folder import damage
from bigbatch.numbers import decimal
from bigbatch.paths import as_path, expand_path


def main(argv: Sequence[str]) -> int:
    """Print and write the report; return 0."""
    arguments = _parser().parse_args(argv)
    if arguments.target is not None and not 0 < arguments.target <= 1:
        raise LaunchOptionError(f"--target {arguments.target:g} must be a share of right answers, such as 0.759")
    if arguments.price is not None and not 0 < arguments.price < math.inf:
        raise LaunchOptionError(f"--price {arguments.price:g} must be what a GPU costs in an hour, such as 2.50")
    results = [read_folder(path) for path in dict.fromkeys(arguments.folders)]
    report = ScalingReport(
        [each for each in results if isinstance(each, SweepResults)],
        [(each, _to_accuracy(each, stated=arguments.target)) for each in results if isinstance(each, RunResults)],
        price=arguments.price,
    )
    own = arguments.folders[0]
    folder = Path(arguments.output or own / "report")
    report.print()
    report.write(folder, within=folder if arguments.output else own)
    print_line(f"written: {folder / 'report.html'} (and .md, .json, PNG and SVG beside it)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch report",
        description="Scaling efficiency of sweeps, and what the rest is lost to: smaller local batches, exposed "
        "communication, input, stragglers. Of runs: time, GPU-hours and energy until an accuracy.",
        epilog="example: bigbatch report runs/sweeps/scaling",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folders", type=as_path, nargs="+", metavar="FOLDER", help="of a sweep, or a run")
    add(
        "--output",
        type=expand_path,
        metavar="DIR",
        help="for report.html and the others (default: report, in the first FOLDER)",
    )
    add(
        "--target",
        type=decimal,
        help="top-1 of runs, such as 0.759 (default: the run's own target, else its best)",
    )
    add(
        "--price",
        type=decimal,
        help="of a GPU (a rank) for an hour, in any currency, such as 2.50: adds what it costs",
    )
    return parser


def _to_accuracy(run: RunResults, *, stated: float | None) -> ToAccuracy:
    """Measure by the stated target, or the run's own. Raises: RunFolderError for a damaged folder."""
    try:
        own = (run.config.get("run") or {}).get("target_top1")
        return to_accuracy(run.records(), target=stated if stated is not None else own)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{run.folder}: {damage(error)}") from error
