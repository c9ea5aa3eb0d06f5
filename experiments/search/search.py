"""A search from coarse to fine: rounds of short runs, each in a smaller space around the best so far.

Jia et al. 2018 (arXiv 1807.11205, section 4.3) tune in this way by hand, the learning rate first of all.
"""

import math
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bigbatch.errors import ConfigError, LaunchOptionError, TuneError, print_line
from bigbatch.experiments.engine.engine import Interrupted
from bigbatch.experiments.engine.folder import SweepFolder, require_same_experiment
from bigbatch.experiments.engine.images import require_images
from bigbatch.experiments.engine.jobs import point_command
from bigbatch.experiments.engine.launch_option import Launch
from bigbatch.experiments.engine.plan import RATE, SweepPlan
from bigbatch.experiments.engine.points import Point
from bigbatch.experiments.report.publish import report_on
from bigbatch.experiments.report.tuned import edge_remark
from bigbatch.experiments.search.plot import draw_search
from bigbatch.experiments.search.rounds import Rounds, held_values, run_rounds
from bigbatch.experiments.search.space import Axis, parse_space
from bigbatch.experiments.search.study import (
    Metric,
    TrialRecord,
    best_record,
    common_reason,
    import_optuna,
    show_result,
)
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import dump_config, load_config, parse_overrides
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import RANGE_TEST
from bigbatch.trainer.config.short_run import shorten, tuples_as_lists
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.words import count

DRY_RUN_TRIALS = 3
"""Number of commands that --dry-run shows."""


@dataclass(frozen=True, kw_only=True)
class Search:
    config: tuple[str, ...]
    """Words of `bigbatch train`: --config NAME and overrides."""
    space: tuple[str, ...]
    folder: Path
    trials: int
    """Trials of all rounds together."""
    rounds: int
    epochs: int
    metric: Metric
    prune: bool
    """Stop a trial that is worse than the median of the others."""
    parallel: int
    launch: Launch

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Return the space of the first round. Raises: ConfigError."""
        return parse_space(self.space)

    @cached_property
    def base(self) -> Config:
        """Return the experiment that is searched. Raises: ConfigError."""
        return self._load({})

    @property
    def plan(self) -> SweepPlan:
        """Return the trials as a sweep's plan: where and how long they run, and the settings that choose values."""
        decides = ("space", "trials", "rounds", "metric", "prune")
        return SweepPlan(
            name="search",
            config=self.config[1],
            options=parse_overrides(self.config[2:], prog="bigbatch tune search"),
            epochs=self.epochs,
            study={name: tuples_as_lists(getattr(self, name)) for name in decides},
            **self.launch.place,
        )

    def check(self, *, starts: bool = False) -> None:
        """Check everything that can be checked without running. starts: as for require_images. Raises: ConfigError."""
        for name in ("trials", "rounds", "epochs", "parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.rounds > self.trials:
            raise ConfigError(f"--rounds {self.rounds} exceed --trials {self.trials}: each round needs a trial")
        points = [self.point(0, {}, self.short_config({}, directory=self.folder))]
        for axis, text in zip(self.axes, self.space, strict=True):
            # an illegal value fails now, before any trial runs
            for value in axis.probes:
                try:
                    config = self.short_config({axis.key: value}, directory=self.folder)
                except ConfigError as error:
                    raise ConfigError(*(f"--space {text}: at {value}, {line}" for line in error.args)) from error
                points.append(self.point(len(points), {axis.key: value}, config))
        require_images(self.plan, points, starts=starts)

    def _load(self, values: dict[str, str]) -> Config:
        """Load the experiment with these values; without a range test's file if the rate is searched but not given."""
        is_searched = any(axis.key == RATE for axis in self.axes)
        without = [f"--{RANGE_TEST}=null"] if is_searched and RATE not in values else []
        tried = [f"--{key}={value}" for key, value in values.items()]
        return load_config([*self.config, *without, *tried], prog="bigbatch tune search")

    def complete_config(self, values: dict[str, str]) -> Config:
        """Return the complete experiment with these values. Raises: ConfigError."""
        config = self._load(values)
        accumulation_steps(config.batch, world_size=self.launch.num_ranks)
        return config

    def short_config(self, values: dict[str, str], *, directory: Path) -> Config:
        """Return the config that the trial with these values runs. Raises: ConfigError."""
        config = self.complete_config(values)
        return shorten(config, epochs=self.epochs, evaluate_each=self.prune, directory=directory)

    def point(self, number: int, values: dict[str, str], config: Config) -> Point:
        ranks = self.launch.num_ranks
        return Point(number, held_values(config, values), config.run.seed, ranks, ranks, 1, config)

    @property
    def prune_from_epoch(self) -> int:
        """Return the first epoch after the warm-up; in the warm-up, a large learning rate has no effect yet."""
        short = self.short_config({}, directory=self.folder)
        return math.floor(short.schedule.warmup_epochs) + 1

    def started(self) -> Rounds:
        """Return the rounds that run in its folder."""
        return Rounds(
            plan=self.plan,
            axes=self.axes,
            trials=self.trials,
            rounds=self.rounds,
            metric=self.metric,
            seed=self.base.run.seed,
            make=self._trial,
            parallel=self.parallel,
            prune_from_epoch=self.prune_from_epoch if self.prune else None,
        )

    def _trial(self, number: int, values: dict[str, str]) -> Point:
        directory = SweepFolder(self.folder).run(number).path
        return self.point(number, values, self.short_config(values, directory=directory))


def search(stated: Search) -> list[TrialRecord] | None:
    """Run the search, or the rest of it; return its trials, or None if a signal stopped it before its end.

    Call it in the main thread, which receives the signals.
    Raises: ConfigError before anything runs; TuneError if all trials fail, or another search owns the folder.
    """
    import_optuna()
    folder = SweepFolder(stated.folder)
    stated.check(starts=not folder.sweep.exists())
    try:
        _require_same(stated, folder)  # before the lock file is created there, and again under the lock
        with folder.locked():
            _require_same(stated, folder)
            folder.prepare(stated.plan, [])
            # also for a continued search: trials import what this command names
            RunDir(folder.path).write_text(folder.path / "base.yaml", dump_config(stated.base))
            try:
                records = run_rounds(stated.started(), folder)
            except Interrupted:
                print_line("stopped; the same command continues the search")
                return None
            _finish(stated, folder, records)
            return records
    except LaunchOptionError as error:  # of a sweep's folder
        raise TuneError(str(error).replace("--folder", "--study")) from error


def first_commands(stated: Search) -> None:
    """Print what the first trials would run; writes nothing. Raises: ConfigError; TuneError."""
    import_optuna()
    stated.check()
    folder, rounds = SweepFolder(stated.folder), stated.started()
    with tempfile.TemporaryDirectory() as scratch:
        study = rounds.open(Path(scratch) / "journal.log", stated.axes, number=1, first=1)
        for _ in range(min(DRY_RUN_TRIALS, rounds.sizes[0])):
            point = rounds.make(*study.ask())
            number = point.number
            print_line(f"point {number} ({point.describe()}): {shlex.join(point_command(stated.plan, point, folder))}")


def _require_same(stated: Search, folder: SweepFolder) -> None:
    """Raise LaunchOptionError if the folder holds anything but this search; write nothing."""
    base = folder.path / "base.yaml"
    folder.require_same(stated.plan)
    if folder.sweep.exists() and base.exists():
        require_same_experiment(base, stated.base, config=stated.plan.config)


def _finish(stated: Search, folder: SweepFolder, records: Sequence[TrialRecord]) -> None:
    """Write the report, best.yaml and the plot, and print the result. Raises: TuneError if no trial finished."""
    best = best_record(records, metric=stated.metric)
    if best is None:
        raise TuneError(
            f"all {len(records)} trials in {folder.path} failed, {common_reason(records)}. Fix that, or search other "
            "values, in another --study"
        )
    report_on([folder.path])
    for axis, text in zip(stated.axes, stated.space, strict=True):
        if axis.is_edge(best.values[axis.key]):
            print_line(edge_remark(*text.split("=", 1)))
    where, path, out = " ".join(str(folder.path).split()), folder.path / "best.yaml", RunDir(folder.path)
    values = ", ".join(f"{key}={value}" for key, value in best.values.items())
    out.write_text(
        path,
        f"# bigbatch tune search in {where}: trial {best.number} of {stated.trials}, of "
        f"{count(stated.epochs, 'epoch')} each\n"
        f"# {show_result(best, metric=stated.metric)} with {values}\n"
        f"{dump_config(stated.complete_config(best.values))}",
    )
    out.save_plot(folder.path / "search.png", draw_search(records, stated.axes, metric=stated.metric))
    print_line(f"plot: {folder.path / 'search.png'}; to train with the best values: bigbatch train --config {path}")
