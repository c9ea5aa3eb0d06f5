"""The training loop of a run: its steps, and the reports, evaluations and checkpoints between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from bigbatch.errors import CaptureFailed, DataError
from bigbatch.trainer.checkpoint.saving import CheckpointSaver
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.evaluator import Evaluator
from bigbatch.trainer.input.base import Batch, require_few_bad_images
from bigbatch.trainer.observe.observer import Observer, calls
from bigbatch.trainer.report.output import RunOutput
from bigbatch.trainer.step.loop import InputLost, Steps
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.stop_request import Stopped, StopRequest
from bigbatch.trainer.step.window import Totals


class TrainingLoop:
    """Runs the steps, and reports, evaluates and saves between them. All methods are collective.

    skipped: bad images that this run has already skipped, and why.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        parts: Parts,
        *,
        evaluator: Evaluator,
        saver: CheckpointSaver,
        output: RunOutput,
        stop: StopRequest,
        observers: Sequence[Observer],
        skipped: dict[str, str],
    ) -> None:
        self.config, self.plan, self.parts = config, plan, parts
        self.evaluator, self.saver, self.output, self.stop = evaluator, saver, output, stop
        self.observers, self.skipped = observers, skipped
        self._before_step, self._after_step = calls(observers, "before_step"), calls(observers, "after_step")
        self._extra_microbatches = calls(observers, "extra_microbatches")
        self.saved_step = self.done = plan.first_step
        self._steps: Steps | None = None

    def run(self, batches: Iterator[Batch]) -> Totals:
        """Run the remaining steps; stop early, with a checkpoint, if any rank was asked to stop.

        If the input of a rank fails, the state before that step is saved first.
        Raises: TrainingDiverged; ReplicasDiffer; PeerLostError; Joining; DataError from the input.
        """
        plan, parts, stop, observers = self.plan, self.parts, self.stop, self.observers
        for observer in reversed(observers):
            batches = observer.start(batches)
        self._steps = steps = Steps(plan, parts, batches)
        steps.train_step.before_update = calls(observers, "before_update")
        totals = steps.totals
        for step in range(plan.first_step, plan.num_steps):
            for look in self._before_step:
                look(step)
            try:
                steps.train_step(step, steps.stream)
            except CaptureFailed:
                if steps.train_step.window.steps:  # the input may have failed in them
                    self._report(steps, step)
                raise
            self.done = done = step + 1
            for look in self._after_step:
                look(done)
            is_due = stop.is_due()
            if not (is_due or plan.is_report(done)):
                continue
            joining = stop.joining if is_due else None
            # after the last step only its evaluation can be stopped
            is_stop = is_due and not joining and done < plan.num_steps
            parts.precision.wait_for_weights()  # needed unless a step comes next: all code below may read the weights
            self._report(steps, done)
            if joining:  # the next group evaluates or saves, if due
                raise joining
            if is_stop:
                self.save(done, None)  # the resumed run makes an evaluation that is due
            elif plan.is_evaluation(done):
                is_stop = self._evaluate_and_save(totals)
            elif plan.is_checkpoint(done):
                self.save(done, None)
            if is_stop:
                totals.stopped_by = stop.asked_by
                break
            if plan.is_evaluation(done) and self.evaluator.reason_to_end():
                break
            steps.start_over()
        self.collect_checkpoint(wait=True)
        for observer in observers:
            observer.end()
        return totals

    def _report(self, steps: Steps, done: int) -> None:
        """Report the steps since the last report. Raises: TrainingDiverged; ReplicasDiffer; DataError."""
        for observer in self.observers:
            observer.before_report(done)
        try:
            record, replaced = steps.report(done)
        except InputLost as lost:
            with self._saving_on_failure(lost.done):
                self._skip(lost.done, lost.replaced, split="train")
                raise
        self.collect_checkpoint(wait=False)
        for observer in self.observers:
            record |= observer.figures(done)
        self.output.report(record)
        data = self.config.data
        if hint := self.parts.prepare.statistics.hint(mean=data.mean, std=data.std):
            self.output.hint(hint, step=done)
        for observer in self.observers:
            observer.at_report(record)
        self.parts.precision.require_progress(done, is_last=done == self.plan.num_steps)
        with self._saving_on_failure(done):
            self._skip(done, replaced, split="train")

    def _evaluate_and_save(self, totals: Totals) -> bool:
        """Evaluate and save a checkpoint; return whether a stop request came first."""
        try:
            with self._saving_on_failure(self.done):
                totals.last_evaluation = self.evaluate(self.done)
        except Stopped:
            return True
        self.save(self.done, totals.last_evaluation["top1"])
        self.parts.model.train()
        return False

    def evaluate(self, done: int) -> dict[str, Any]:
        """Evaluate after done steps; return the record. Raises: Stopped; DataError."""
        return self.evaluator.evaluate(
            done,
            epoch=done / self.plan.steps_per_epoch,
            is_last=done == self.plan.num_steps,
            skipped=partial(self._skip, done, split="val"),
            on_evaluation=self._evaluated,
        )

    def _evaluated(self, record: dict[str, Any]) -> None:
        self.output.evaluated(record)
        for observer in self.observers:
            observer.at_evaluation(record, self.parts.model)

    def save(self, done: int, top1: float | None) -> None:
        """Start to write a checkpoint of this state, once the previous one is on disk. Raises: as saver.start()."""
        self.collect_checkpoint(wait=True)
        # of the checkpoint's own step, like everything else in it: a run that starts after that step has not set it
        self.parts.set_lr_(step=max(done - 1, 0))
        self.saver.start(done=done, top1=top1, evaluations=self.evaluator.found, skipped=self.skipped)
        self.saved_step = done

    def collect_checkpoint(self, *, wait: bool) -> None:
        """Report the started checkpoint if it is on disk. Raises: as saver.collect()."""
        if saved := self.saver.collect(wait=wait):
            for observer in self.observers:
                observer.at_checkpoint(saved.path, step=saved.step, seconds=saved.seconds)

    @property
    def totals(self) -> Totals:
        """Totals of its reports so far."""
        return self._steps.totals if self._steps else Totals()

    def copy_state(self) -> dict[str, Any] | None:
        """Return a copy of the state after the last step, in host memory. Not collective.

        None if an update ended in the middle, or is sharded: this rank then has only a part of the state.
        """
        if self.config.optimizer.sharded or (self._steps and not self._steps.train_step.is_whole):
            return None
        return self.saver.copy_state(done=self.done, evaluations=self.evaluator.found, skipped=self.skipped)

    def extra_microbatches(self, step: int) -> list[int]:
        """Return the numbers of the microbatches that observers read in a step after this rank's own."""
        return [number for extra in self._extra_microbatches for number in extra(step)]

    def summary(self) -> dict[str, Any]:
        """Return the observers' figures for the summary."""
        return {name: value for observer in self.observers for name, value in observer.summary().items()}

    def close(self) -> None:
        """Remove the hooks of a step that has not ended."""
        for observer in self.observers:
            observer.close()

    def _skip(self, done: int, images: dict[int, str], *, split: str) -> None:
        """Record bad images that were replaced. Raises: DataError if there are more than data.max_skipped."""
        if not images:
            return
        named = {f"{split}/{position}": reason for position, reason in sorted(images.items())}
        new = {name: reason for name, reason in named.items() if name not in self.skipped}
        self.skipped |= new
        for reason in new.values():
            self.output.say(f"skipped: {reason}")
        if new:
            self.output.log("skipped", {"step": done, "images": new})
        require_few_bad_images(list(self.skipped.values()), max_skipped=self.config.data.max_skipped)

    @contextmanager
    def _saving_on_failure(self, done: int) -> Iterator[None]:
        """Context for work between steps: saves the state after step done before bad data or a stop end the run."""
        try:
            yield
        except (DataError, Stopped):
            # a second checkpoint of a step would lack the accuracy of the first
            if done > self.saved_step:
                self.save(done, None)
            self.collect_checkpoint(wait=True)
            # the first rank writes, and tells the others what to raise: this barrier keeps all ranks until they know
            self.parts.communicator.gather("saved")
            raise
