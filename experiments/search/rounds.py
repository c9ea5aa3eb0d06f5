"""Rounds of short runs from coarse to fine: each covers a smaller space around the best trial so far."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bigbatch.errors import ConfigError, print_line
from bigbatch.experiments.engine.engine import run_points
from bigbatch.experiments.engine.folder import DONE, FAILED, PENDING, SweepFolder, first_state
from bigbatch.experiments.engine.plan import SweepPlan
from bigbatch.experiments.engine.points import Point
from bigbatch.experiments.report.show import ProgressDisplay
from bigbatch.experiments.search.space import Axis
from bigbatch.experiments.search.study import Metric, Round, TrialRecord, best_record
from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.config.short_run import tuples_as_lists
from bigbatch.trainer.folder.folder import read_records
from bigbatch.user_settings import visible_gpus
from bigbatch.words import count


def held_values(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of a trial's keys as its config holds them, for its record in YAML."""
    return {key: tuples_as_lists(lookup(config, key)) for key in keys}


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What decides the values of all trials, and how they run."""

    plan: SweepPlan
    """Where trials run, and their epochs."""
    axes: tuple[Axis, ...]
    """The space of the first round."""
    trials: int
    """Trials of all rounds together."""
    rounds: int
    metric: Metric
    seed: int
    make: Callable[[int, dict[str, str]], Point]
    """Makes the trial of a number with these values. Raises: ConfigError if they do not fit together."""
    parallel: int
    prune_from_epoch: int | None = None
    """First epoch after which a trial may stop that is worse than the median of the others; None: none stops early."""

    @property
    def sizes(self) -> list[int]:
        """Divide the trials among the rounds: as evenly as possible, the first rounds take the rest."""
        share, rest = divmod(self.trials, self.rounds)
        return [share + (number < rest) for number in range(self.rounds)]

    def open(self, journal: Path, axes: tuple[Axis, ...], *, number: int, first: int) -> Round:
        """Open the study of a round. Raises: TuneError; RunFolderError."""
        return Round(
            journal,
            axes,
            number=number,
            first=first,
            maximize=self.metric == "top1",
            prune_from_epoch=self.prune_from_epoch or 0,
            seed=self.seed,
        )


def run_rounds(rounds: Rounds, folder: SweepFolder) -> list[TrialRecord]:
    """Run the trials that are left; return all that ended. Raises: Interrupted; TuneError; RunFolderError."""
    records: list[TrialRecord] = []
    axes, sizes, show = rounds.axes, rounds.sizes, ProgressDisplay(folder, num_points=rounds.trials)
    gpus = visible_gpus(count_gpus()) if rounds.parallel > 1 and "hosts" not in rounds.plan.launch else []
    for number, size in enumerate(sizes, start=1):
        print_line(f"round {number} of {len(sizes)}, {count(size, 'trial')}: " + "; ".join(map(str, axes)))
        study = rounds.open(folder.path / "journal.log", axes, number=number, first=len(records) + 1)
        trials = _Trials(rounds, folder, study, show)
        run_points(
            rounds.plan,
            trials.points(size),
            folder,
            on_end=trials.end,
            why_stop=trials.why_stop,
            parallel=rounds.parallel,
            gpus=gpus,
        )
        records += study.ended()
        if best := best_record(records, metric=rounds.metric):
            # around the best of all rounds so far, not only of the last one
            axes = tuple(axis.narrowed(best.values[axis.key]) for axis in axes)
    return records


class _Trials:
    """Makes a round's points from the values that its study chooses, and reports their results to the study."""

    def __init__(self, rounds: Rounds, folder: SweepFolder, study: Round, show: ProgressDisplay) -> None:
        self._rounds, self._folder, self._study, self._show = rounds, folder, study, show

    def points(self, size: int) -> Iterator[Point]:
        """Yield the trials that a round of that size has yet to run."""
        left = self._study.unfinished()
        for _ in self._study.ended():
            self._show.skip()
        for _ in range(size - len(self._study.ended())):
            number, values = left.pop(0) if left else self._study.ask()
            why = ""
            try:
                point = self._rounds.make(number, values)
            except ConfigError as error:  # each value is legal with the others' defaults, but not every combination is
                point, why = replace(self._rounds.make(number, {}), values=dict(values)), str(error)
            if not self._folder.state(number).exists():
                self._folder.write_state(number, first_state(point))
            state = self._folder.read_state(number)
            if why:
                state = self._folder.change_state(number, state=FAILED, reason=why)
            if state["state"] == PENDING:
                yield point
            else:  # it cannot run, or a search was killed before it noted the end
                self.end(point, state)

    def why_stop(self, point: Point, evaluation: dict[str, Any]) -> str:
        """Note an evaluation in the study; return why to stop the trial before its end, or "" to let it run."""
        rounds, epoch = self._rounds, round(evaluation["epoch"])
        is_worse = self._study.should_stop(point.number, epoch=epoch, result=self._result(evaluation))
        epochs = 0 if rounds.prune_from_epoch is None else rounds.plan.epochs or 0
        return f"worse than the median after {epoch} of {epochs} epochs" if is_worse and epoch < epochs else ""

    def _result(self, evaluation: dict[str, Any]) -> float:
        value = evaluation[self._rounds.metric]
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
