"""Choose the values of a search's trials by Optuna, and keep trials in its journal; only this file imports Optuna."""

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from bigbatch.errors import TuneError, UserError, first_line, pip_install
from bigbatch.experiments.engine.folder import DONE, FAILED, PRUNED
from bigbatch.experiments.report.tuned import result_text
from bigbatch.experiments.search.space import Axis, SearchRange
from bigbatch.files import LIST_BYTES, read_plain, refuse_link
from bigbatch.trainer.folder.folder import writing

FIRST_JUDGED = 4
"""Trials of a round that finish before any is pruned; a median of fewer is too uncertain."""

Metric = Literal["top1", "loss"]
ENDS = {DONE: "COMPLETE", PRUNED: "PRUNED", FAILED: "FAIL"}
"""State of a point that has ended -> Optuna's state of the trial."""


@dataclass(frozen=True)
class TrialRecord:
    """A trial that ended."""

    number: int
    round: int
    values: dict[str, str]
    state: str
    """One of ENDS."""
    result: float | None
    """Result of the last evaluation, a fraction or nats; None for a trial that failed."""
    reason: str
    """Why it failed, or was stopped."""


def best_record(records: Sequence[TrialRecord], *, metric: Metric) -> TrialRecord | None:
    """Return the first finished trial with the highest top-1 or the lowest loss; None if none finished."""
    finished = [(record, record.result) for record in records if record.state == DONE]
    sign = -1 if metric == "top1" else 1
    best = min(finished, key=lambda pair: (sign * (pair[1] or 0.0), pair[0].number), default=None)
    return best and best[0]


def common_reason(records: Sequence[TrialRecord]) -> str:
    """Return the most common reason why trials failed; reasons that differ only in their numbers count as one."""
    kinds = [re.sub(r"\d[\d.e+-]*", "#", record.reason) for record in records]
    kind, num_alike = Counter(kinds).most_common(1)[0]
    return f"{num_alike} of them for this reason: {records[kinds.index(kind)].reason}"


def show_result(record: TrialRecord, *, metric: Metric) -> str:
    return result_text(record.result or 0.0, metric=metric)


def import_optuna() -> Any:
    """Import Optuna, and limit its log to warnings. Raises: TuneError naming the extra to install."""
    try:
        import optuna

        import_module("scipy.stats.qmc")  # Optuna's quasi-random sampler needs it
    except ImportError as error:
        raise TuneError(f"a search needs {error.name}: {pip_install('tune')}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Round:
    """The trials of one round: spread evenly (quasi-random) over its space, in a journal that survives a kill.

    Only one process may open a round's journal. Errors of the file system raise RunFolderError.
    """

    def __init__(
        self,
        journal: Path,
        axes: tuple[Axis, ...],
        *,
        number: int,
        first: int,
        maximize: bool,
        prune_from_epoch: int,
        seed: int,
    ) -> None:
        """Open the round. first: number of its first trial. prune_from_epoch: no trial is pruned before.

        Raises: TuneError, also for a damaged journal.
        """
        self._optuna = optuna = import_optuna()
        self._journal, self._axes, self._number, self._first = journal, axes, number, first
        with _reading(journal):
            refuse_link(journal)  # Optuna would write through it
            # a kill or a full disk may have cut off the last line, to which the next one would be appended
            if journal.exists() and (text := read_plain(journal, most=LIST_BYTES)) and not text.endswith(b"\n"):
                os.truncate(journal, text.rfind(b"\n") + 1)
            file = optuna.storages.journal.JournalFileBackend(str(journal), _NoLock())
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(file),
                study_name=f"round-{number}",
                direction="maximize" if maximize else "minimize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=FIRST_JUDGED, n_warmup_steps=prune_from_epoch),
            )
        seed += number  # else all rounds would try the same shares of their ranges
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # before Optuna 5
            # Optuna draws a study's trials at random until one has finished; the seed differs after every start, or the
            # draws would repeat
            independent = optuna.samplers.RandomSampler(seed=(seed + len(self._study.trials)) % 2**32)
            # Sobol's sequence, scrambled by the seed; the journal holds its position
            self._study.sampler = optuna.samplers.QMCSampler(
                seed=seed % 2**32, scramble=True, independent_sampler=independent
            )
        self._trials: dict[int, Any] = {}

    def ask(self) -> tuple[int, dict[str, str]]:
        """Start a new trial; return its number and values."""
        with writing(self._journal):
            return self._values(self._study.ask())

    def unfinished(self) -> list[tuple[int, dict[str, str]]]:
        """List the trials that were running when the last search in this folder was stopped or killed."""
        with writing(self._journal):
            running = self._study.get_trials(states=(self._optuna.trial.TrialState.RUNNING,))
            return [self._values(self._optuna.trial.Trial(self._study, trial._trial_id)) for trial in running]

    def _values(self, trial: Any) -> tuple[int, dict[str, str]]:
        """Return a trial's number and values; values that the journal lacks are chosen now."""
        values = {axis.key: _suggest(trial, axis) for axis in self._axes}
        trial.set_user_attr("values", values)
        number = self._first + trial.number
        self._trials[number] = trial
        return number, values

    def should_stop(self, number: int, *, epoch: int, result: float) -> bool:
        """Note an evaluation; return True if the trial is worse than the median of the others after as many epochs."""
        trial = self._trials[number]
        with writing(self._journal):
            # a resumed trial may repeat an epoch
            if epoch not in self._study.trials[number - self._first].intermediate_values:
                trial.report(result, epoch)
            return bool(trial.should_prune())

    def tell(self, number: int, state: str, *, result: float | None = None, reason: str = "") -> None:
        """Note the end of a trial; state: one of ENDS."""
        with writing(self._journal):
            self._trials[number].set_user_attr("reason", reason)
            self._study.tell(self._trials[number], result, state=self._optuna.trial.TrialState[ENDS[state]])

    def ended(self) -> list[TrialRecord]:
        """List every trial that ended, in the order of their start."""
        trials = [(each, state) for each in self._study.trials for state, end in ENDS.items() if each.state.name == end]
        return [
            TrialRecord(
                self._first + each.number,
                self._number,
                each.user_attrs["values"],
                state,
                each.value,
                each.user_attrs["reason"],
            )
            for each, state in trials
        ]


class _NoLock:
    """Replaces Optuna's lock, a link that survives a kill: if its target is missing, Optuna waits without end."""

    def acquire(self) -> bool:
        """Do nothing: the folder's lock excludes others."""
        return True

    def release(self) -> None:
        """Do nothing."""


@contextmanager
def _reading(journal: Path) -> Iterator[None]:
    """Guard code that reads the whole journal. Raises: RunFolderError; TuneError if it is damaged."""
    try:
        with writing(journal):
            yield
    except UserError:
        raise
    except Exception as error:  # any error that Optuna raises on a foreign line
        raise TuneError(f"{journal} is damaged ({first_line(error)}): choose another --study") from error


def _suggest(trial: Any, axis: Axis) -> str:
    """Suggest a value as a config states it; a value in the journal stays.

    A grid uses the index of a value, so that all keys share one quasi-random sequence.
    """
    if not isinstance(axis, SearchRange):
        return axis.texts[trial.suggest_int(axis.key, 0, len(axis.texts) - 1)]
    if axis.is_int:
        return axis.text(trial.suggest_int(axis.key, int(axis.low), int(axis.high), log=axis.is_log))
    return axis.text(trial.suggest_float(axis.key, axis.low, axis.high, log=axis.is_log))
