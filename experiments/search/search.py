"""A search from coarse to fine: rounds of short runs, each in a smaller space around the best so far.

Jia et al. 2018 (arXiv 1807.11205, section 4.3) tune so by hand, the learning rate first of all.
"""

import math
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.environ import visible_gpus
from bigbatch.errors import ConfigError, LaunchOptionError, TuneError, print_line
from bigbatch.experiments.engine.engine import Interrupted, run_points
from bigbatch.experiments.engine.folder import (
    DONE,
    FAILED,
    MISSING,
    PRUNED,
    SweepFolder,
    alone_in,
    change_state,
    first_state,
    prepare,
    read_state,
    require_same,
    require_same_experiment,
    write_state,
)
from bigbatch.experiments.engine.jobs import point_command
from bigbatch.experiments.engine.plan import Plan
from bigbatch.experiments.engine.points import Point
from bigbatch.experiments.launching import Launch, parse_launch
from bigbatch.experiments.report.publish import report_on
from bigbatch.experiments.search.plot import draw_search
from bigbatch.experiments.search.records import (
    Metric,
    TrialEnd,
    TrialRecord,
    best_record,
    result_of,
    show_result,
    show_values,
)
from bigbatch.experiments.search.space import Axis, flags, parse_space, shrink
from bigbatch.experiments.search.study import Round, import_optuna
from bigbatch.experiments.show import Show
from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import dump_config, load_config, parse_overrides
from bigbatch.trainer.config.range_test import KEY as RANGE_TEST
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.config.short_run import plain, shorten
from bigbatch.trainer.run.folder import RunDir, read_records

RATE = "schedule.base_lr"
DRY_RUN_TRIALS = 3
"""Number of commands that --dry-run shows."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search as the command line states it."""

    config: tuple[str, ...]
    """Words of `bigbatch train`: --config NAME and overrides."""
    space: tuple[str, ...]
    """The text of each --space."""
    folder: Path
    trials: int
    """Trials of all rounds together."""
    rounds: int
    epochs: int
    """Epochs of a trial."""
    metric: Metric
    prune: bool
    """Stop a trial that is worse than the median of the others."""
    parallel: int
    """Trials at once."""
    launch: tuple[str, ...]
    """Words of `bigbatch launch` for each trial; none for one process."""


@dataclass(frozen=True)
class Outcome:
    """Result of a whole search."""

    best: TrialRecord
    records: tuple[TrialRecord, ...]
    best_yaml: Path
    """The complete experiment with the best values."""

    @property
    def overrides(self) -> list[str]:
        """Return the best values as options of `bigbatch train`."""
        return flags(self.best.values)


@dataclass(frozen=True)
class CheckedSearch:
    """A search with checked settings."""

    stated: Search
    axes: tuple[Axis, ...]
    base: Config
    launch: Launch

    @property
    def plan(self) -> Plan:
        """Return a plan of where and how long trials run, and of all that determines the trials."""
        stated = self.stated
        decides = ("space", "trials", "rounds", "metric", "prune")
        return Plan(
            name="search",
            config=stated.config[1],
            options=parse_overrides(stated.config[2:], prog="bigbatch tune search"),
            epochs=stated.epochs,
            search={name: plain(getattr(stated, name)) for name in decides},
            **self.launch.place,
        )

    def config(self, values: dict[str, str]) -> Config:
        """Return the complete experiment with these values. Raises: ConfigError."""
        config = _load(self.stated, self.axes, values)
        accumulation_steps(config.batch, world_size=self.launch.num_ranks)
        return config

    def short_config(self, values: dict[str, str], *, directory: Path) -> Config:
        """Return the config that the trial with these values runs. Raises: ConfigError."""
        stated = self.stated
        return shorten(self.config(values), epochs=stated.epochs, evaluate_each=stated.prune, directory=directory)

    def point(self, number: int, values: dict[str, str], config: Config) -> Point:
        """Make the point of a trial."""
        held = {key: plain(lookup(config, key)) for key in values}
        ranks = self.launch.num_ranks
        return Point(number, held, config.run.seed, ranks, ranks, 1, config)

    @property
    def prune_from_epoch(self) -> int:
        """Return the first epoch after the warm-up; in the warm-up, a large learning rate has no effect yet."""
        short = self.short_config({}, directory=self.stated.folder)
        return math.floor(short.schedule.warmup_epochs) + 1

    def round_sizes(self) -> list[int]:
        """Divide the trials among the rounds: as evenly as possible, the first rounds take the rest."""
        share, rest = divmod(self.stated.trials, self.stated.rounds)
        return [share + (number < rest) for number in range(self.stated.rounds)]


def check_search(stated: Search) -> CheckedSearch:
    """Check everything that can be checked without running. Raises: ConfigError."""
    for name in ("trials", "rounds", "epochs", "parallel"):
        if getattr(stated, name) < 1:
            raise ConfigError(f"--{name} {getattr(stated, name)} must be at least 1")
    if stated.rounds > stated.trials:
        raise ConfigError(f"--rounds {stated.rounds} exceed --trials {stated.trials}: each round needs a trial")
    axes, launch = parse_space(stated.space), parse_launch(stated.launch)
    checked = CheckedSearch(stated, axes, _load(stated, axes, {}), launch)
    checked.short_config({}, directory=stated.folder)
    for axis, text in zip(axes, stated.space, strict=True):
        # an illegal value fails now, before any trial runs
        for end in axis.ends:
            try:
                checked.short_config({axis.key: end}, directory=stated.folder)
            except ConfigError as error:
                raise ConfigError(*(f"--space {text}: at {end}, {line}" for line in error.args)) from error
    return checked


def _load(stated: Search, axes: Sequence[Axis], values: dict[str, str]) -> Config:
    """Load the experiment with these values; if the rate is searched, without the file of a range test."""
    is_searched = any(axis.key == RATE for axis in axes)
    without = [f"--{RANGE_TEST}=null"] if is_searched and RATE not in values else []
    return load_config([*stated.config, *without, *flags(values)], prog="bigbatch tune search")


def search(stated: Search, *, say: Say = print_line) -> Outcome | None:
    """Run the search, or the rest of it; return None if a signal stopped it before its end.

    Call it in the main thread, which receives the signals.
    Raises: ConfigError before anything runs; TuneError if all trials fail, or another search owns the folder.
    """
    import_optuna()
    checked, folder = check_search(stated), SweepFolder(stated.folder)
    _enter(checked, folder, writes=False)  # before the lock is written there, and again under it
    with _naming_the_option(), alone_in(folder):
        _enter(checked, folder, writes=True)
        records: list[TrialRecord] = []
        axes, sizes = checked.axes, checked.round_sizes()
        show = Show(folder, num_points=stated.trials, is_terminal=sys.stdout.isatty())
        gpus = visible_gpus(count_gpus()) if stated.parallel > 1 and checked.launch.hosts is None else []
        try:
            for number, size in enumerate(sizes, start=1):
                say(f"round {number} of {len(sizes)}, {size} trials: " + "; ".join(map(str, axes)))
                study = _round(checked, folder.path / "journal.log", axes, number=number)
                trials = _Trials(checked, folder, study, first=len(records) + 1, count=size, show=show)
                run_points(checked.plan, trials, folder, parallel=stated.parallel, gpus=gpus)
                records += [
                    TrialRecord(trials.first + index, number, values, ended) for index, values, ended in study.ended()
                ]
                if best := best_record(records, metric=stated.metric):
                    # around the best of all rounds so far, not only of the last one
                    axes = shrink(axes, best.values)
        except Interrupted:
            say("stopped; the same command goes on from there")
            return None
        finally:
            show.close()
        return _finish(checked, folder, records, say=say)


def first_commands(stated: Search, *, say: Say = print_line) -> None:
    """Print what the first trials would run; writes nothing. Raises: ConfigError; TuneError."""
    import_optuna()
    checked, folder = check_search(stated), SweepFolder(stated.folder)
    with tempfile.TemporaryDirectory() as scratch:
        study = _round(checked, Path(scratch) / "journal.log", checked.axes, number=1)
        for _ in range(min(DRY_RUN_TRIALS, checked.round_sizes()[0])):
            index, values = study.ask()
            config = checked.short_config(values, directory=folder.run(1 + index).path)
            point = checked.point(1 + index, values, config)
            say(f"point {point.number} ({point.describe()}): {shlex.join(point_command(checked.plan, point, folder))}")


@contextmanager
def _naming_the_option() -> Iterator[None]:
    """Turn a folder's refusal into a TuneError that names this command's option."""
    try:
        yield
    except LaunchOptionError as error:
        raise TuneError(str(error).replace("--folder", "--study")) from error


def _enter(checked: CheckedSearch, folder: SweepFolder, *, writes: bool) -> None:
    """Begin a search, or continue the same one. Raises: TuneError if the folder holds something else."""
    base = folder.path / "base.yaml"
    with _naming_the_option():
        require_same(folder, checked.plan, [])
        if folder.sweep.exists() and base.exists():
            require_same_experiment(base, checked.base, config=checked.plan.config)
        if writes:
            prepare(folder, checked.plan, [])
            # also for a continued search: trials import what this command names
            RunDir(folder.path).write_text(base, dump_config(checked.base))


def _round(checked: CheckedSearch, journal: Path, axes: tuple[Axis, ...], *, number: int) -> Round:
    return Round(
        journal,
        axes,
        number=number,
        maximize=checked.stated.metric == "top1",
        prune_from_epoch=checked.prune_from_epoch,
        seed=checked.base.run.seed,
    )


class _Trials:
    """Produces the trials of one round: asks the study for values, and reports the results to it."""

    watches = True

    def __init__(
        self, checked: CheckedSearch, folder: SweepFolder, study: Round, *, first: int, count: int, show: Show
    ) -> None:
        self.first = first
        self._checked, self._folder, self._study, self._show = checked, folder, study, show
        self._waiting = study.unfinished()
        self._left = count - len(study.ended()) - len(self._waiting)
        for _ in study.ended():
            show.skip()

    def next_point(self) -> Point | None:
        """Return the next trial to run."""
        while self._waiting or self._left > 0:
            if not self._waiting:
                self._left -= 1
                self._waiting.append(self._study.ask())
            index, values = self._waiting.pop(0)
            number = self.first + index
            directory = self._folder.run(number).path
            try:
                config, why = self._checked.short_config(values, directory=directory), ""
            except ConfigError as error:  # each value is legal with the others' defaults, but not every combination is
                config, why = self._checked.base, str(error)
            point = self._checked.point(number, values, config)
            if not self._folder.state(number).exists():
                held = point.values if not why else dict(values)
                write_state(self._folder, number, first_state(point) | {"values": held})
            state = read_state(self._folder, number)
            if why:
                state = change_state(self._folder, number, state=FAILED, reason=why)
            if state["state"] == MISSING:
                return point
            self.end(point, state)  # a search was killed before it noted the end
        return None

    def why_stop(self, point: Point, evaluation: dict[str, Any]) -> str:
        """Note an evaluation in the study; return why to stop the trial, if the study prunes it before its end."""
        stated, epoch = self._checked.stated, round(evaluation["epoch"])
        index, result = point.number - self.first, evaluation[stated.metric]
        is_worse = self._study.should_stop(index, epoch=epoch, result=result)
        is_stopped = stated.prune and is_worse and epoch < stated.epochs
        return f"worse than the median after {epoch} of {stated.epochs} epochs" if is_stopped else ""

    def end(self, point: Point, state: dict[str, Any]) -> None:
        """Note in the study how a trial ended."""
        self._study.tell(point.number - self.first, self._ended(point, state))
        self._show.end(point, state)

    def _ended(self, point: Point, state: dict[str, Any]) -> TrialEnd:
        seconds, reason = float(state["seconds"] or 0.0), str(state["reason"] or "")
        if state["state"] == PRUNED:
            return TrialEnd("pruned", None, reason, seconds)
        if state["state"] != DONE:
            return TrialEnd("failed", None, reason, seconds)
        evaluations = [each for each in read_records(self._folder.run(point.number).metrics) if each["kind"] == "eval"]
        result = float(evaluations[-1][self._checked.stated.metric]) if evaluations else math.nan
        if not math.isfinite(result):
            return TrialEnd("failed", None, f"its last evaluation's result is {result}", seconds)
        return TrialEnd("finished", result, "", seconds)


def _finish(checked: CheckedSearch, folder: SweepFolder, records: Sequence[TrialRecord], *, say: Say) -> Outcome:
    """Write files and print the result. Raises: TuneError if no trial finished."""
    metric, out = checked.stated.metric, RunDir(folder.path)
    best = best_record(records, metric=metric)
    if best is None:
        raise TuneError(_explain_failure(records, folder))
    report_on([folder.path])
    for axis in checked.axes:
        if axis.is_edge(best.values[axis.key]):
            say(f"the best {axis.key} lies at an end of its range: there may be better ones beyond {axis}")
    path = folder.path / "best.yaml"
    out.write_text(path, _best_yaml(checked, best, folder=folder.path))
    out.save_plot(folder.path / "search.png", draw_search(records, checked.axes, metric=metric))
    say(f"plot: {folder.path / 'search.png'}; to train with the best values: bigbatch train --config {path}")
    return Outcome(best, tuple(records), path)


def _best_yaml(checked: CheckedSearch, best: TrialRecord, *, folder: Path) -> str:
    """Return the complete experiment, with a comment on the origin of its values."""
    stated, where = checked.stated, " ".join(str(folder).split())
    return (
        f"# bigbatch tune search in {where}: trial {best.number} of {stated.trials}, of {stated.epochs} epochs each\n"
        f"# {show_result(result_of(best), metric=stated.metric)} with {show_values(best.values)}\n"
        f"{dump_config(checked.config(best.values))}"
    )


def _explain_failure(records: Sequence[TrialRecord], folder: SweepFolder) -> str:
    """Explain the failure; reasons that differ only in their numbers count as one."""
    kinds = [re.sub(r"\d[\d.e+-]*", "#", record.ended.reason) for record in records]
    kind, count = Counter(kinds).most_common(1)[0]
    return (
        f"all {len(records)} trials in {folder.path} failed, {count} of them so: "
        f"{records[kinds.index(kind)].ended.reason}. Mend that, or search other values, in another --study"
    )
