"""A search from coarse to fine: rounds of short runs, each in a smaller space around the best so far.

Jia et al. 2018 (arXiv 1807.11205, section 4.3) tune so by hand, the learning rate first of all.
"""

import re
import shlex
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bigbatch.comm.rendezvous.environ import visible_gpus
from bigbatch.errors import TuneError
from bigbatch.trainer.config.short_run import differences
from bigbatch.trainer.step.signals import STOP_SIGNALS, handling
from bigbatch.trainer.tune.search import report
from bigbatch.trainer.tune.search.experiment import Experiment, Search, make_experiment
from bigbatch.trainer.tune.search.folder import StudyFolder, alone_in, enter, require_own
from bigbatch.trainer.tune.search.records import TrialRecord, best_record
from bigbatch.trainer.tune.search.rounds import MakeArgv, RoundRunner, Workplace
from bigbatch.trainer.tune.search.short_run import gpus_of, train_argv
from bigbatch.trainer.tune.search.space import Axis, flags, shrink
from bigbatch.trainer.tune.search.study import Round, import_optuna

DRY_RUN_TRIALS = 3
"""Commands that --dry-run shows."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Says what a whole search found."""

    best: TrialRecord
    records: tuple[TrialRecord, ...]
    best_yaml: Path
    """The whole experiment with the best values."""

    @property
    def overrides(self) -> list[str]:
        """Return the best values as options of `bigbatch train`."""
        return flags(self.best.values)


def search(stated: Search, *, say: Say = print, make_argv: MakeArgv = train_argv) -> Outcome | None:
    """Run the search, or what is left of it; None where a signal stopped it before its end.

    To be called in the main thread, for the sake of the signals.
    Raises: ConfigError before anything runs; TuneError where all trials fail, or another search owns the folder.
    """
    import_optuna()
    experiment, folder = make_experiment(stated), StudyFolder(stated.folder)
    require_own(folder, experiment.identity())  # before the locks are put there, and again under them
    with alone_in(folder, say=say) as lock, noting_stops() as stops, report.progress(stated.trials, say) as shown:
        enter(folder, experiment.identity())
        records: list[TrialRecord] = []

        def on_end(record: TrialRecord) -> None:
            shown.say(f"trial {record.number}: {record.describe(metric=stated.metric)}")
            shown.advance()

        work = Workplace(experiment, folder, lock, _gpus(stated), stops, on_end, make_argv)
        axes, sizes = experiment.axes, experiment.round_sizes()
        for number, size in enumerate(sizes, start=1):
            shown.say(f"round {number} of {len(sizes)}, {size} trials: " + "; ".join(map(str, axes)))
            study = _round(experiment, folder.journal, axes, number=number)
            runner = RoundRunner(work, study, number=number, first=len(records) + 1, count=size)
            shown.advance(len(runner.records()))
            is_whole = runner.run()
            records += runner.records()
            if not is_whole:
                shown.say(f"stopped by {stops[0]}; the same command goes on from there")
                return None
            if best := best_record(records, metric=stated.metric):
                # around the best of all rounds so far, not of the last one alone
                axes = shrink(axes, best.values)
    return _finish(experiment, folder, records, say=say)


def first_commands(stated: Search, *, say: Say = print) -> None:
    """Print what the first trials would run; writes nothing. Raises: ConfigError; TuneError."""
    import_optuna()
    experiment, folder = make_experiment(stated), StudyFolder(stated.folder)
    with tempfile.TemporaryDirectory() as scratch:
        study = _round(experiment, Path(scratch) / "journal.log", experiment.axes, number=1)
        for slot in range(min(DRY_RUN_TRIALS, experiment.round_sizes()[0])):
            index, values = study.ask()
            short = experiment.short_config(values, directory=folder.trial(1 + index))
            gpus = gpus_of(slot % stated.parallel, gpus=_gpus(stated), launch=experiment.launch)
            options = differences(experiment.base, short)
            say(shlex.join(train_argv(options, base=folder.base, launch=experiment.launch, gpus=gpus)))


def _round(experiment: Experiment, journal: Path, axes: tuple[Axis, ...], *, number: int) -> Round:
    return Round(
        journal,
        axes,
        number=number,
        maximize=experiment.search.metric == "top1",
        prune_from_epoch=experiment.prune_from_epoch,
        seed=experiment.base.run.seed,
    )


def _gpus(stated: Search) -> list[str]:
    """List GPUs to share out among trials at once; none where one trial may have them all."""
    if stated.parallel == 1:
        return []
    import torch

    return visible_gpus(torch.cuda.device_count())


def _finish(experiment: Experiment, folder: StudyFolder, records: Sequence[TrialRecord], *, say: Say) -> Outcome:
    """Write files and words on what came out. Raises: TuneError where no trial finished."""
    metric = experiment.search.metric
    folder.write_text(folder.trials, report.as_json_lines(records))
    best = best_record(records, metric=metric)
    if best is None:
        raise TuneError(_explain_failure(records, folder))
    for line in report.table(records, metric=metric):
        say(line)
    for axis in experiment.axes:
        if axis.is_edge(best.values[axis.key]):
            say(f"the best {axis.key} lies at an end of its range: there may be better ones beyond {axis}")
    text = report.best_yaml(experiment.config(best.values), best, folder=folder.path, search=experiment.search)
    folder.write_text(folder.best, text)
    report.plot_search(records, experiment.axes, folder.plot, metric=metric)
    say(f"plot: {folder.plot}; to train with the best values: bigbatch train --config {folder.best}")
    return Outcome(best, tuple(records), folder.best)


def _explain_failure(records: Sequence[TrialRecord], folder: StudyFolder) -> str:
    """Explain the failure; reasons that differ in their numbers only count as one."""
    kinds = [re.sub(r"\d[\d.e+-]*", "#", record.ended.reason) for record in records]
    kind, count = Counter(kinds).most_common(1)[0]
    return (
        f"all {len(records)} trials in {folder.path} failed, {count} of them so: "
        f"{records[kinds.index(kind)].ended.reason}. Mend that, or search other values, in another --study"
    )


@contextmanager
def noting_stops() -> Iterator[list[str]]:
    """Note the names of the stop signals that came meanwhile."""
    came: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number).name)

    with handling(STOP_SIGNALS, note):
        yield came
