"""`bigbatch tune search`: the best of any config values, found on short runs."""

import argparse
from collections.abc import Sequence

from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import INTERRUPTED, TuneError
from bigbatch.experiments.engine.launch_option import parse_launch
from bigbatch.experiments.search.search import Search, first_commands, search
from bigbatch.experiments.search.space import FORMS
from bigbatch.paths import as_path, expand_path
from bigbatch.words import whole


def main(argv: Sequence[str]) -> int:
    """Search as argv says; return the exit code. Raises: ConfigError; TuneError."""
    if (size := read_process_env().world_size) > 1:
        raise TuneError(f"a search is one process, not {size}: start it alone, and give its trials --launch")
    stated = parse_search(argv)
    if _parser().parse_known_args(argv)[0].dry_run:
        first_commands(stated)
        return 0
    return INTERRUPTED if search(stated) is None else 0


def parse_search(argv: Sequence[str]) -> Search:
    """Parse the search that a command line states. Raises: ConfigError."""
    arguments, overrides = _parser().parse_known_args(argv)
    return Search(
        config=("--config", arguments.config, *overrides),
        space=tuple(arguments.space),
        folder=arguments.study,
        trials=arguments.trials,
        rounds=arguments.rounds,
        epochs=arguments.epochs,
        metric=arguments.metric,
        prune=arguments.prune == "median",
        parallel=arguments.parallel,
        launch=parse_launch(arguments.launch),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch tune search",
        usage="bigbatch tune search --config NAME --space KEY=RANGE --trials N --epochs N --study FOLDER [OPTION ...] "
        "[--section.key VALUE ...]",
        description="Train a config for a few epochs with many values, first over whole ranges, then in smaller "
        "ones around the best. The same command continues a search that was stopped or killed.",
        epilog="example: bigbatch tune search --config quickstart --space schedule.base_lr=log:1:40 --trials 8 "
        "--epochs 2 --study runs/search",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=expand_path, required=True, help="YAML file, or name of a packaged experiment")
    add("--space", action="append", default=[], metavar="KEY=RANGE", help=f"once per key: {FORMS}")
    add("--trials", type=whole, required=True, help="short runs in all")
    add("--epochs", type=whole, required=True, help="of each trial; warm-up, milestones and sizes shrink in proportion")
    add("--study", type=as_path, required=True, metavar="FOLDER", help="folder of the search")
    add("--rounds", type=whole, default=2, help="rounds, coarse to fine: each covers a third of the last (default: 2)")
    add(
        "--metric",
        choices=("top1", "loss"),
        default="top1",
        help="ranks trials by their last evaluation (default: top1)",
    )
    add("--prune", choices=("median", "none"), default="median", help="stop trials below the median (default: median)")
    add("--parallel", type=whole, default=1, help="number of trials that run at once on this machine (default: 1)")
    add("--launch", default="", metavar="WORDS", help="words of bigbatch launch, such as 'mpirun --ranks 2'")
    add("--dry-run", action="store_true", help="print the first commands instead of running them")
    return parser
