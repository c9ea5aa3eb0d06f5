"""The trials of a round, several at once if asked for: started, followed, stopped, noted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.short_run import differences
from bigbatch.trainer.tune.search.experiment import Experiment
from bigbatch.trainer.tune.search.folder import StudyFolder
from bigbatch.trainer.tune.search.records import TrialEnd, TrialRecord
from bigbatch.trainer.tune.search.running import RunningTrial
from bigbatch.trainer.tune.search.short_run import Launch, gpus_of, train_argv
from bigbatch.trainer.tune.search.study import Round

POLL_SECONDS = 0.2
MakeArgv = Callable[..., list[str]]
"""train_argv, or what stands in for it in a test."""


@dataclass
class _Active:
    """Holds a trial that runs; why it is to end early, if it is."""

    index: int
    values: dict[str, str]
    running: RunningTrial
    pruned_because: str = ""


@dataclass(frozen=True)
class Workplace:
    """Holds what trials of a search share. lock: the file that they inherit; gpus: names for CUDA_VISIBLE_DEVICES."""

    experiment: Experiment
    folder: StudyFolder
    lock: IO[bytes]
    gpus: Sequence[str]
    stops: Sequence[str]
    """Names of the stop signals that came so far."""
    on_end: Callable[[TrialRecord], None]
    make_argv: MakeArgv = train_argv


class RoundRunner:
    """Runs one round to its end, or until it is stopped."""

    def __init__(self, workplace: Workplace, study: Round, *, number: int, first: int, count: int) -> None:
        """Take first: number of the round's first trial in the search; count: of its trials."""
        self._work, self._study = workplace, study
        self._number, self._first, self._count = number, first, count
        self._active: dict[int, _Active] = {}

    def run(self) -> bool:
        """Run the round; False where it was stopped: its trials wait in the journal then."""
        waiting = self._study.unfinished()
        num_started = len(self._study.ended()) + len(waiting)
        try:
            while True:
                while self._free_slots() and not self._work.stops and (waiting or num_started < self._count):
                    if not waiting:
                        waiting, num_started = [self._study.ask()], num_started + 1
                    self._start(*waiting.pop(0))
                if not self._active:
                    return not self._work.stops
                self._follow()
                if self._work.stops.count("SIGINT") > 1:
                    raise KeyboardInterrupt
                time.sleep(POLL_SECONDS)
        finally:
            for active in self._active.values():
                active.running.end()

    def records(self) -> list[TrialRecord]:
        """List the round's trials that ended."""
        return [self._record(*each) for each in self._study.ended()]

    def _record(self, index: int, values: dict[str, str], ended: TrialEnd) -> TrialRecord:
        return TrialRecord(self._first + index, self._number, values, ended)

    def _free_slots(self) -> list[int]:
        return [slot for slot in range(self._work.experiment.search.parallel) if slot not in self._active]

    def _start(self, index: int, values: dict[str, str]) -> None:
        work, slot = self._work, self._free_slots()[0]
        launch: Launch = work.experiment.launch
        folder = work.folder.trial(self._first + index)
        try:
            config = work.experiment.short_config(values, directory=folder)
        except ConfigError as error:  # each value is legal with the others as they were, but not all are together
            self._end(index, values, TrialEnd("failed", None, str(error), 0.0))
            return
        argv = work.make_argv(
            differences(work.experiment.base, config),
            base=work.folder.base,
            launch=launch,
            gpus=gpus_of(slot, gpus=work.gpus, launch=launch),
        )
        self._active[slot] = _Active(index, values, RunningTrial(argv, folder, inherits=work.lock))

    def _follow(self) -> None:
        for slot, active in list(self._active.items()):
            code = active.running.exit_code()  # before its files are read: after an exit they are whole
            self._judge(active, is_running=code is None)
            if code is not None:
                del self._active[slot]
                self._conclude(active, code)
            elif self._work.stops and not active.running.was_asked:
                active.running.ask_to_stop()

    def _judge(self, active: _Active, *, is_running: bool) -> None:
        """Tell the study what was evaluated; stop what it calls hopeless, if it has not got to its end."""
        search = self._work.experiment.search
        for record in active.running.new_evaluations():
            epoch = round(record["epoch"])
            is_worse = self._study.should_stop(active.index, epoch=epoch, result=record[search.metric])
            if search.prune and is_worse and is_running and epoch < search.epochs and not active.running.was_asked:
                active.pruned_because = f"worse than the median after {epoch} of {search.epochs} epochs"
                active.running.ask_to_stop()

    def _conclude(self, active: _Active, code: int) -> None:
        seconds = active.running.seconds
        evaluation = active.running.last_evaluation()
        if code == 0 and evaluation is not None:
            result = float(evaluation[self._work.experiment.search.metric])
            ended = TrialEnd("finished", result, "", seconds)
            # not ">=": so NaN fails, too
            if not abs(result) < float("inf"):
                ended = TrialEnd("failed", None, f"its last evaluation's result is {result}", seconds)
        elif active.pruned_because:
            ended = TrialEnd("pruned", None, active.pruned_because, seconds)
        elif self._work.stops:
            return  # it goes on from its checkpoint when the search does
        else:
            ended = TrialEnd("failed", None, active.running.reason(), seconds)
        self._end(active.index, active.values, ended)

    def _end(self, index: int, values: dict[str, str], ended: TrialEnd) -> None:
        self._study.tell(index, ended)
        self._work.on_end(self._record(index, values, ended))
