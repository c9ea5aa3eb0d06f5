"""`bigbatch ablate`: run what is missing of an ablation, and make its table."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import LaunchOptionError, print_line, tell
from bigbatch.exit_codes import INTERRUPTED, SOME_FAILED
from bigbatch.launch.ablate import outcome
from bigbatch.launch.ablate.inference import measure
from bigbatch.launch.ablate.plan import Ablation, choose, find_ablation, make_points, packaged_ablations
from bigbatch.launch.sweep.folder import FAILED, SweepFolder, alone_in, prepare, require_same, state_of, to_run
from bigbatch.launch.sweep.points import Point, describe_values
from bigbatch.launch.sweep.running import Interrupted, run_points
from bigbatch.launch.sweep.show import Show, print_table
from bigbatch.launch.tables import show_table, stdout_console
from bigbatch.numbers import whole
from bigbatch.paths import expand_path


def main(argv: Sequence[str]) -> int:
    """Run what is missing; return 0 where all runs are done, 3 where some failed, 130 where a person stopped it."""
    arguments, overrides = _parser().parse_known_args(argv)
    for name in ("epochs", "seeds"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise LaunchOptionError(f"--{name} {value} must be a number from 1 on")
    ablation = find_ablation(arguments.ablation)
    folder = SweepFolder(Path(arguments.folder or ablation.folder))
    epochs, seeds = arguments.epochs, arguments.seeds
    points = make_points(ablation, folder=folder.path, epochs=epochs, seeds=seeds, overrides=overrides)
    chosen = choose(points, arguments.only)
    require_same(folder, ablation.as_sweep(), points)
    if arguments.dry_run:
        _explain(ablation, overrides)
        print_table(folder, chosen)
        return 0
    with alone_in(folder):
        prepare(folder, ablation.as_sweep(), points)
        missing = to_run(folder, chosen, retry_failed=arguments.retry_failed)
        print_line(f"{folder.path}: {len(chosen)} runs, {len(missing)} to do")
        return _run(ablation, missing, folder, points=points, chosen=chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch ablate",
        usage="bigbatch ablate NAME_OR_FILE [--folder DIR] [--epochs N] [--seeds K] [--only STEP,...] [--retry-failed] "
        "[--dry-run] [--section.key=VALUE ...]",
        description="Train a recipe trick by trick, each on top of those before it, one run after the other on this "
        "machine, and make the table: seconds of training and accuracy of each. The same command goes on with what "
        "is missing, with more --seeds too, and with a run that was stopped from its checkpoint; one that fails does "
        f"not end the others. Exit code: 0 when all runs are done, {SOME_FAILED} when some failed. Any key of the "
        "experiment can be overridden in all steps.",
        epilog="example: bigbatch ablate bag_of_tricks --seeds 3 --data.root=data/cifar10",
        allow_abbrev=False,
    )
    add = parser.add_argument
    names = ", ".join(packaged_ablations())
    add(
        "ablation",
        type=expand_path,
        metavar="NAME_OR_FILE",
        help=f"a file, or the name of a packaged ablation: {names}",
    )
    add("--folder", type=expand_path, help="for the runs and the table (default: runs/ablations/NAME)")
    add("--epochs", type=whole, help="of every step, its schedule in proportion (default: each step's own)")
    add("--seeds", type=whole, default=1, help="runs of each step, with seeds of their own (default: 1)")
    add("--only", metavar="STEP,...", help="these steps, with all changes of those before them (default: all)")
    add("--retry-failed", action="store_true", help="run failed ones again")
    add("--dry-run", action="store_true", help="print the steps, and what there is of them")
    return parser


def _explain(ablation: Ablation, overrides: Sequence[str]) -> None:
    print_line(f"{ablation.name}: {len(ablation.steps)} steps from {ablation.config}, each on top of those before it")
    for name, changes in ablation.steps.items():
        print_line(f"  {name}: " + (describe_values(changes) or "no change"))
    if overrides:
        print_line(f"  in all steps: {' '.join(overrides)}")


def _run(
    ablation: Ablation,
    missing: Sequence[Point],
    folder: SweepFolder,
    *,
    points: Sequence[Point],
    chosen: Sequence[Point],
) -> int:
    show = Show(folder, num_points=len(missing), is_terminal=sys.stdout.isatty())
    try:
        run_points(ablation.as_sweep(), missing, folder, on_end=show.end, goes_on=True)
        inference = measure(ablation, points, folder)
    except (Interrupted, KeyboardInterrupt):
        tell("stopped; the same command goes on with what is missing")
        return INTERRUPTED
    finally:
        show.close()
    steps = outcome.collect(ablation, points, folder)
    outcome.write(ablation, steps, inference, outcome.conditions_of(points, folder), folder=folder.path)
    for table in outcome.tables_of(ablation, steps, inference):
        show_table(table, stdout_console())
    print_line(f"written: {folder.path / 'ablation.md'} (and .json and .png beside it)")
    failed = sum(state_of(folder, point.number) == FAILED for point in chosen)
    if failed:
        print_line(
            f"{failed} of {len(chosen)} runs failed, their output is in points/N/log.txt; --retry-failed runs them"
        )
    return SOME_FAILED if failed or (inference and any(form.undone for form in inference.forms)) else 0
