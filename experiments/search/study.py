"""The journal of a search and the choice of its values, by Optuna; the only file that imports it."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from bigbatch.errors import TuneError, UserError, first_line
from bigbatch.experiments.search.records import State, TrialEnd
from bigbatch.experiments.search.space import Axis, SearchRange
from bigbatch.files import read_plain, refuse_link
from bigbatch.trainer.run.folder import writing

FIRST_JUDGED = 4
"""Trials of a round that finish before any is pruned; a median of fewer is too uncertain."""


def import_optuna() -> Any:
    """Import Optuna, with its messages from warnings on. Raises: TuneError naming the extra to install."""
    try:
        import optuna

        import_module("scipy.stats.qmc")  # Optuna's quasi-random sampler needs it
    except ImportError as error:
        raise TuneError(f"a search needs {error.name}: pip install 'bigbatch[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Round:
    """The trials of one round: spread evenly (quasi-random) over its space, in a journal that survives a kill.

    A trial is identified by its index in the round. Only one process may open a round's journal. Errors of the file
    system raise RunFolderError.
    """

    def __init__(
        self, journal: Path, axes: tuple[Axis, ...], *, number: int, maximize: bool, prune_from_epoch: int, seed: int
    ) -> None:
        """Open the round. prune_from_epoch: no trial is pruned before. Raises: TuneError, also for a damaged one."""
        self._optuna = optuna = import_optuna()
        self._journal = journal
        self._axes = axes
        self._distributions = {axis.key: _distribution(optuna, axis) for axis in axes}
        with _reading(journal):
            refuse_link(journal)  # Optuna would write through it
            _drop_cut_off_line(journal)
            file = optuna.storages.journal.JournalFileBackend(str(journal), _NoLock())
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(file),
                study_name=f"round-{number}",
                direction="maximize" if maximize else "minimize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=FIRST_JUDGED, n_warmup_steps=prune_from_epoch),
            )
        self._study.sampler = self._sampler(seed + number)  # else all rounds would try the same shares of their ranges
        self._trials: dict[int, Any] = {}

    def _sampler(self, seed: int) -> Any:
        """Make Sobol's sequence, scrambled by the seed; the journal holds its position.

        Optuna draws the first trial of a study at random, and others until one has finished: from a new stream after
        every start, or the draws would repeat.
        """
        samplers = self._optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)  # before Optuna 5
            independent = samplers.RandomSampler(seed=(seed + len(self._study.trials)) % 2**32)
            return samplers.QMCSampler(seed=seed % 2**32, scramble=True, independent_sampler=independent)

    def ask(self) -> tuple[int, dict[str, str]]:
        """Start a new trial; return its index and values."""
        with writing(self._journal):
            return self._values(self._study.ask())

    def unfinished(self) -> list[tuple[int, dict[str, str]]]:
        """List the trials that were running when the last search in this folder was stopped or killed."""
        with writing(self._journal):
            running = self._study.get_trials(states=(self._optuna.trial.TrialState.RUNNING,))
            return [self._values(self._optuna.trial.Trial(self._study, trial._trial_id)) for trial in running]

    def _values(self, trial: Any) -> tuple[int, dict[str, str]]:
        """Return a trial's values; values that the journal lacks are chosen now."""
        values = {axis.key: _text(axis, _suggest(trial, axis, self._distributions[axis.key])) for axis in self._axes}
        trial.set_user_attr("values", values)
        self._trials[trial.number] = trial
        return trial.number, values

    def should_stop(self, index: int, *, epoch: int, result: float) -> bool:
        """Note an evaluation; return True if the trial is worse than the median of the others after as many epochs."""
        trial = self._trials[index]
        with writing(self._journal):
            if epoch not in self._study.trials[index].intermediate_values:  # a resumed trial may repeat an epoch
                trial.report(result, epoch)
            return bool(trial.should_prune())

    def tell(self, index: int, ended: TrialEnd) -> None:
        """Note how a trial ended."""
        trial, states = self._trials[index], self._optuna.trial.TrialState
        with writing(self._journal):
            for name, value in (("state", ended.state), ("reason", ended.reason), ("seconds", ended.seconds)):
                trial.set_user_attr(name, value)
            if ended.state == "finished":
                self._study.tell(trial, ended.result)
            else:
                self._study.tell(trial, state=states.PRUNED if ended.state == "pruned" else states.FAIL)

    def ended(self) -> list[tuple[int, dict[str, str], TrialEnd]]:
        """List index, values and outcome of every trial that ended, in the order of their start."""
        return [
            (trial.number, trial.user_attrs["values"], _ended(trial))
            for trial in self._study.trials
            if trial.state.is_finished()
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


def _drop_cut_off_line(journal: Path) -> None:
    """Drop a last line that a kill or a full disk has cut off: the next one would be appended to it.

    Its trial is done again. Raises: OSError.
    """
    if journal.exists() and (text := read_plain(journal)) and not text.endswith(b"\n"):
        os.truncate(journal, text.rfind(b"\n") + 1)


def _ended(trial: Any) -> TrialEnd:
    state: State = trial.user_attrs["state"]
    return TrialEnd(state, trial.value, trial.user_attrs["reason"], trial.user_attrs["seconds"])


def _distribution(optuna: Any, axis: Axis) -> Any:
    """Make a distribution; a grid uses the index of a value, so that all keys share one quasi-random sequence."""
    if not isinstance(axis, SearchRange):
        return optuna.distributions.IntDistribution(0, len(axis.texts) - 1)
    if axis.is_int:
        return optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.is_log)
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.is_log)


def _text(axis: Axis, chosen: float) -> str:
    return axis.text(chosen) if isinstance(axis, SearchRange) else axis.texts[int(chosen)]


def _suggest(trial: Any, axis: Axis, distribution: Any) -> float:
    """Suggest a value of the distribution; a value in the journal stays."""
    if isinstance(axis, SearchRange) and not axis.is_int:
        return float(trial.suggest_float(axis.key, distribution.low, distribution.high, log=distribution.log))
    return float(trial.suggest_int(axis.key, distribution.low, distribution.high, log=distribution.log))
