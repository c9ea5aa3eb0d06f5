"""The training loop of a run: its steps, and the reports, evaluations and checkpoints between them."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from bigbatch.errors import DataError
from bigbatch.trainer.build.plan import make_guess_watch
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.evaluator import Evaluator
from bigbatch.trainer.input.base import Batch, require_few_bad_images
from bigbatch.trainer.run.digests import DigestRecorder
from bigbatch.trainer.run.gradient_audit import GradientAudit
from bigbatch.trainer.run.noise_recorder import NoiseRecorder
from bigbatch.trainer.run.output import RunOutput
from bigbatch.trainer.run.saving import CheckpointSaver
from bigbatch.trainer.step.loop import InputLost, Steps
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.stop_request import Stopped
from bigbatch.trainer.step.window import Totals


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """Functions that `bigbatch.train` calls on every rank, with equal arguments except an evaluation's seconds.

    Return values are ignored, exceptions end the run, and records must not be changed. A run that returns to a
    checkpoint because its ranks' weights differ calls them again for the steps after it.
    """

    on_step: Callable[[int], None] = lambda done: None
    """(steps done), after each step, without synchronizing: the device may still compute the weights."""
    on_report: Callable[[dict[str, Any]], None] = lambda record: None
    """(record of metrics.jsonl), after every run.log_every_steps."""
    on_evaluation: Callable[[dict[str, Any], nn.Module], None] = lambda record, model: None
    """(record of metrics.jsonl, model), in evaluation mode with the evaluated weights."""
    on_checkpoint: Callable[[Path], None] = lambda path: None
    """(folder of the checkpoint), at a later report, after rank 0 has written it."""
    on_end: Callable[[dict[str, Any]], None] = lambda summary: None
    """(contents of summary.json), at the end of a run that was not stopped."""


class NoticeWatch:
    """Tracks how long a stop may have to wait for each kind of work, and warns once if that is too long.

    A stop waits for the step under way, or for an evaluation's batches up to its next exchange, and then for two
    checkpoints, since one may be under way. notice_seconds: time between the request and the job's limit.
    """

    def __init__(self, *, notice_seconds: int) -> None:
        self._notice_seconds = notice_seconds
        self._longest = {"step": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self._has_said = False

    def see(self, kind: str, seconds: float) -> str | None:
        """Record the seconds of a step, part of an evaluation, or checkpoint; return a warning or None."""
        self._longest[kind] = max(self._longest[kind], seconds)
        before = max(("step", "evaluation"), key=lambda each: self._longest[each])
        saving = 2 * self._longest["checkpoint"]
        needed = self._longest[before] + saving
        if self._has_said or needed <= self._notice_seconds:
            return None
        self._has_said = True
        what = {"step": "a step", "evaluation": "an evaluation's next exchange"}[before]
        return (
            f"the checkpoint at the time limit may be lost: stopping takes up to {needed:.0f} s here "
            f"({self._longest[before]:.0f} s until {what} is done, {saving:.0f} s to save), and "
            f"the job asks {self._notice_seconds} s before; submit it again with --stop-seconds "
            f"{60 * math.ceil(needed / 30)}"
        )


class TrainingLoop:
    """Runs the steps, and reports, evaluates and saves between them. All methods are collective.

    skipped: bad images that this run has already skipped, and why.
    notice_seconds: time between the job's request to stop and its limit; None if it sends none.
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
        digests: DigestRecorder,
        audit: GradientAudit,
        hooks: TrainingHooks,
        notice_seconds: int | None,
        skipped: dict[str, str],
    ) -> None:
        self.config, self.plan, self.parts = config, plan, parts
        self.evaluator, self.saver, self.output = evaluator, saver, output
        self.digests, self.audit, self.hooks, self.skipped = digests, audit, hooks, skipped
        self.is_audited = False
        self.notice = None if notice_seconds is None else NoticeWatch(notice_seconds=notice_seconds)
        self.noise = NoiseRecorder(config, plan, parts)
        self.saved_step = self.done = plan.first_step
        self._steps: Steps | None = None
        self.guess_watch = make_guess_watch(config, plan)

    def run(self, batches: Iterator[Batch]) -> Totals:
        """Run the remaining steps; stop early, with a checkpoint, if any rank was asked to stop.

        If the input of a rank fails, the state before that step is saved first.
        Raises: TrainingDiverged; ReplicasDiffer; PeerLostError; Joining; DataError from the input.
        """
        plan, parts = self.plan, self.parts
        self._steps = steps = Steps(plan, parts, self.digests.watch(self.audit.watch(batches)))
        steps.train_step.before_update = self._audit
        totals = steps.totals
        for step in range(plan.first_step, plan.num_steps):
            self._train_step(steps, step)
            done = self.done
            # after the last step only its evaluation can be stopped
            is_stop = parts.stop.is_due() and done < plan.num_steps
            joining = parts.stop.joining
            if not (is_stop or joining or plan.is_report(done)):
                continue
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
                totals.stopped_by = parts.stop.asked_by
                break
            if plan.is_evaluation(done) and self.evaluator.reason_to_end():
                break
            steps.start_over()
        self.collect_checkpoint(wait=True)
        self.output.record_timeline(sys.maxsize, wait=parts.precision.wait_for_weights)  # write what is still recorded
        return totals

    def _train_step(self, steps: Steps, step: int) -> None:
        """Run one step, and write the records that are due for it."""
        self.output.record_timeline(step, wait=self.parts.precision.wait_for_weights)
        self.digests.before_step(step)
        self.is_audited = self.audit.before_step(step)
        self.noise.probe.before_step(step)
        steps(step)
        self.done = done = step + 1
        self.noise.probe.after_step(done)
        if record := self.digests.record(done):
            self.output.log("digests", record)
        self.hooks.on_step(done)

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

    def close(self) -> None:
        """Remove the hooks of a step that has not ended."""
        self.digests.single.stop()
        self.audit.close()
        self.noise.probe.end_backward()

    def copy_state(self) -> dict[str, Any] | None:
        """Return a copy of the state after the last step, in host memory. Not collective.

        None if an update ended in the middle, or is sharded: this rank then has only a part of the state.
        """
        if self.config.optimizer.sharded or (self._steps and not self._steps.train_step.is_whole):
            return None
        return self.saver.copy_state(done=self.done, evaluations=self.evaluator.found, skipped=self.skipped)

    def _audit(self) -> None:
        """Compare gradients before their sum, in steps that are audited. Collective. Raises: ReplicasDiffer."""
        if self.is_audited:
            self.digests.single.stop()  # the recomputed microbatch belongs to no record
            self.noise.probe.end_backward()
            self.output.log("audit", self.audit.check())

    def evaluate(self, done: int) -> dict[str, Any]:
        """Evaluate after done steps; return the record. Raises: Stopped; DataError."""
        record = self.evaluator.evaluate(
            done,
            epoch=done / self.plan.steps_per_epoch,
            skipped=partial(self._skip, done, split="val"),
            on_evaluation=self._evaluated,
        )
        self._watch_notice("evaluation", self.evaluator.seconds_to_exchange(record), done=done)
        return record

    def _evaluated(self, record: dict[str, Any]) -> None:
        self.output.evaluated(record)
        self.hooks.on_evaluation(record, self.parts.model)

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
            self._watch_notice("checkpoint", saved.seconds, done=saved.step)
            self.hooks.on_checkpoint(saved.path)

    def _report(self, steps: Steps, done: int) -> None:
        try:
            record, replaced = steps.report(done)
        except InputLost as lost:
            with self._saving_on_failure(lost.done):
                self._skip(lost.done, lost.replaced, split="train")
                raise
        self.collect_checkpoint(wait=False)
        for measured in self.noise.take():
            self.output.log(measured.pop("kind"), measured)
        record = {**record, **self.noise.figures()}
        self.output.report(record)
        if done - self.plan.first_step > self.plan.log_every_steps:  # the first steps compile and warm up
            self._watch_notice("step", self.plan.global_batch_size / record["images_per_second"], done=done)
        data = self.config.data
        if hint := self.parts.prepare.statistics.hint(mean=data.mean, std=data.std):
            self.output.hint(hint, step=done)
        if self.guess_watch:
            self.guess_watch.see(record)
        self.hooks.on_report(record)
        self.parts.precision.require_progress(done, is_last=done == self.plan.num_steps)
        with self._saving_on_failure(done):
            self._skip(done, replaced, split="train")

    def _watch_notice(self, kind: str, seconds: float, *, done: int) -> None:
        """Warn once if a stop takes longer than the job's notice allows."""
        if self.notice and (text := self.notice.see(kind, seconds)):
            self.output.hint(text, step=done)

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
            self.parts.communicator.gather_text("saved")
            raise
