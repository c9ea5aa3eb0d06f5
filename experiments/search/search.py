"""A search from coarse to fine: rounds of short runs, each in a smaller space around the best so far.

Jia et al. 2018 (arXiv 1807.11205, section 4.3) tune in this way by hand, the learning rate first of all.
"""

import math
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bigbatch.errors import ConfigError, LaunchOptionError, TuneError, print_line
from bigbatch.experiments.engine.engine import Interrupted, run_points
from bigbatch.experiments.engine.folder import (
    DONE,
    FAILED,
    PENDING,
    SweepFolder,
    first_state,
    require_same_experiment,
)
from bigbatch.experiments.engine.images import require_images
from bigbatch.experiments.engine.jobs import point_command
from bigbatch.experiments.engine.plan import SweepPlan
from bigbatch.experiments.engine.points import Point
from bigbatch.experiments.launch_option import Launch
from bigbatch.experiments.report.publish import report_on
from bigbatch.experiments.search.plot import draw_search
from bigbatch.experiments.search.space import Axis, parse_space
from bigbatch.experiments.search.study import Metric, Round, TrialRecord, best_record, import_optuna, show_result
from bigbatch.experiments.show import ProgressDisplay
from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import dump_config, load_config, parse_overrides
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.config.sections import RANGE_TEST
from bigbatch.trainer.config.short_run import shorten, tuples_as_lists
from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.user_settings import visible_gpus
from bigbatch.words import count

RATE = "schedule.base_lr"
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
            search={name: tuples_as_lists(getattr(self, name)) for name in decides},
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
        held = {key: tuples_as_lists(lookup(config, key)) for key in values}
        ranks = self.launch.num_ranks
        return Point(number, held, config.run.seed, ranks, ranks, 1, config)

    @property
    def prune_from_epoch(self) -> int:
        """Return the first epoch after the warm-up; in the warm-up, a large learning rate has no effect yet."""
        short = self.short_config({}, directory=self.folder)
        return math.floor(short.schedule.warmup_epochs) + 1

    def round_sizes(self) -> list[int]:
        """Divide the trials among the rounds: as evenly as possible, the first rounds take the rest."""
        share, rest = divmod(self.trials, self.rounds)
        return [share + (number < rest) for number in range(self.rounds)]

    def open_round(self, journal: Path, axes: tuple[Axis, ...], *, number: int, first: int) -> Round:
        """Open the study of a round. Raises: TuneError; RunFolderError."""
        return Round(
            journal,
            axes,
            number=number,
            first=first,
            maximize=self.metric == "top1",
            prune_from_epoch=self.prune_from_epoch,
            seed=self.base.run.seed,
        )


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
            show = ProgressDisplay(folder, num_points=stated.trials)
            try:
                records = _run_rounds(stated, folder, show)
            except Interrupted:
                print_line("stopped; the same command continues the search")
                return None
            _finish(stated, folder, records)
            return records
    except LaunchOptionError as error:  # of a sweep's folder
        raise TuneError(str(error).replace("--folder", "--study")) from error


def _run_rounds(stated: Search, folder: SweepFolder, show: ProgressDisplay) -> list[TrialRecord]:
    """Run the rounds that are left. Raises: Interrupted."""
    records: list[TrialRecord] = []
    axes, sizes = stated.axes, stated.round_sizes()
    gpus = visible_gpus(count_gpus()) if stated.parallel > 1 and stated.launch.hosts is None else []
    for number, size in enumerate(sizes, start=1):
        print_line(f"round {number} of {len(sizes)}, {count(size, 'trial')}: " + "; ".join(map(str, axes)))
        study = stated.open_round(folder.path / "journal.log", axes, number=number, first=len(records) + 1)
        trials = _Trials(stated, folder, study, show)
        run_points(
            stated.plan,
            trials.points(size),
            folder,
            on_end=trials.end,
            why_stop=trials.why_stop,
            parallel=stated.parallel,
            gpus=gpus,
        )
        records += study.ended()
        if best := best_record(records, metric=stated.metric):
            # around the best of all rounds so far, not only of the last one
            axes = tuple(axis.narrowed(best.values[axis.key]) for axis in axes)
    return records


def first_commands(stated: Search) -> None:
    """Print what the first trials would run; writes nothing. Raises: ConfigError; TuneError."""
    import_optuna()
    stated.check()
    folder = SweepFolder(stated.folder)
    with tempfile.TemporaryDirectory() as scratch:
        study = stated.open_round(Path(scratch) / "journal.log", stated.axes, number=1, first=1)
        for _ in range(min(DRY_RUN_TRIALS, stated.round_sizes()[0])):
            number, values = study.ask()
            point = stated.point(number, values, stated.short_config(values, directory=folder.run(number).path))
            print_line(f"point {number} ({point.describe()}): {shlex.join(point_command(stated.plan, point, folder))}")


def _require_same(stated: Search, folder: SweepFolder) -> None:
    """Raise LaunchOptionError if the folder holds anything but this search; write nothing."""
    base = folder.path / "base.yaml"
    folder.require_same(stated.plan)
    if folder.sweep.exists() and base.exists():
        require_same_experiment(base, stated.base, config=stated.plan.config)


class _Trials:
    """Makes a round's points from the values that its study chooses, and reports their results to the study."""

    def __init__(self, stated: Search, folder: SweepFolder, study: Round, show: ProgressDisplay) -> None:
        self._stated, self._folder, self._study, self._show = stated, folder, study, show

    def points(self, size: int) -> Iterator[Point]:
        """Yield the trials that a round of that size has yet to run."""
        left = self._study.unfinished()
        for _ in self._study.ended():
            self._show.skip()
        for _ in range(size - len(self._study.ended())):
            number, values = left.pop(0) if left else self._study.ask()
            directory, why = self._folder.run(number).path, ""
            try:
                config = self._stated.short_config(values, directory=directory)
            except ConfigError as error:  # each value is legal with the others' defaults, but not every combination is
                config, why = self._stated.base, str(error)
            point = self._stated.point(number, values, config)
            if not self._folder.state(number).exists():
                held = point.values if not why else dict(values)
                self._folder.write_state(number, first_state(point) | {"values": held})
            state = self._folder.read_state(number)
            if why:
                state = self._folder.change_state(number, state=FAILED, reason=why)
            if state["state"] == PENDING:
                yield point
            else:  # it cannot run, or a search was killed before it noted the end
                self.end(point, state)

    def why_stop(self, point: Point, evaluation: dict[str, Any]) -> str:
        """Note an evaluation in the study; return why to stop the trial before its end, or "" to let it run."""
        stated, epoch = self._stated, round(evaluation["epoch"])
        is_worse = self._study.should_stop(point.number, epoch=epoch, result=self._result(evaluation))
        is_stopped = stated.prune and is_worse and epoch < stated.epochs
        return f"worse than the median after {epoch} of {stated.epochs} epochs" if is_stopped else ""

    def _result(self, evaluation: dict[str, Any]) -> float:
        value = evaluation[self._stated.metric]
        return math.nan if value is None else float(value)  # JSON has null for a number that is not finite

    def end(self, point: Point, state: dict[str, Any]) -> None:
        """Note in the study how a trial ended."""
        how, result, reason = state["state"], None, str(state["reason"] or "")
        if how == DONE:
            metrics = self._folder.run(point.number).metrics
            evaluations = [record for record in read_records(metrics) if record["kind"] == "eval"]
            result = self._result(evaluations[-1]) if evaluations else math.nan
            if not math.isfinite(result):
                how, result, reason = FAILED, None, f"its last evaluation's result is {result}"
        self._study.tell(point.number, how, result=result, reason=reason)
        self._show.end(point, state)


def _finish(stated: Search, folder: SweepFolder, records: Sequence[TrialRecord]) -> None:
    """Write the report, best.yaml and the plot, and print the result. Raises: TuneError if no trial finished."""
    best = best_record(records, metric=stated.metric)
    if best is None:
        # reasons that differ only in their numbers count as one
        kinds = [re.sub(r"\d[\d.e+-]*", "#", record.reason) for record in records]
        kind, num_alike = Counter(kinds).most_common(1)[0]
        raise TuneError(
            f"all {len(records)} trials in {folder.path} failed, {num_alike} of them for this reason: "
            f"{records[kinds.index(kind)].reason}. Fix that, or search other values, in another --study"
        )
    report_on([folder.path])
    for axis in stated.axes:
        if axis.is_edge(best.values[axis.key]):
            print_line(f"the best {axis.key} lies at an end of its range: there may be better ones beyond {axis}")
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
