"""One run from start to end: files on the first rank, collectives on all."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigbatch.awake import awake_seconds
from bigbatch.errors import ReplicasDiffer, add_note, exit_code_of
from bigbatch.exit_codes import LOST
from bigbatch.files import as_json
from bigbatch.trainer.build.input import Splits, measure_input, train_batches
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.inference.accuracy import BATCHES_BETWEEN_EXCHANGES
from bigbatch.trainer.input.report import MeasuredInput, describe_input, input_record
from bigbatch.trainer.run.checkpoint import list_checkpoints, write_on_first
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.resume import ResumePoint
from bigbatch.trainer.run.summary import describe_job, dry_run_lines, introduction
from bigbatch.trainer.step.plan import Plan
from bigbatch.trainer.step.stop_request import Joining, Stopped
from bigbatch.trainer.step.window import Totals
from bigbatch.trainer.training_loop import TrainingLoop


class TrainingRun:
    """Controls one run from start to end: files on the first rank, collectives on all.

    placement: lines for the log on this process and its data. is_healed: the run continues from a state in memory.
    """

    def __init__(
        self,
        config: Config,
        loop: TrainingLoop,
        *,
        splits: Splits,
        start: ResumePoint,
        placement: list[str],
        is_healed: bool,
    ) -> None:
        self.config, self.loop, self.splits, self.start = config, loop, splits, start
        self.parts, self.communicator = loop.parts, loop.parts.communicator
        self._placement, self._is_healed = placement, is_healed
        self._rundir, self._output = RunDir(Path(config.run.directory)), loop.output
        self._measured: MeasuredInput | None = None

    @property
    def plan(self) -> Plan:
        return self.loop.plan

    def run(
        self, *, message: str = "", since: float | None = None, wants_join: Callable[[], object] = lambda: False
    ) -> dict[str, Any] | None:
        """Train to the end or a stop signal; return the summary, or None if stopped.

        message: why the run starts at this step. since: awake_seconds() when the ranks stopped for others to join.
        wants_join: returns a true value if other ranks want to join. Raises: Joining after all ranks have agreed on it.
        """
        stop, control = self.parts.stop, self.communicator.control
        try:
            self._begin(message, since)
            with stop.watch(control, acknowledge=self._acknowledge, wants_join=wants_join):
                totals, seconds = self._train()
            summary = self._finish(totals, seconds=seconds)
        except BaseException as error:
            with suppress(Exception):  # the error that ended the run says more
                self.close(LOST if isinstance(error, Joining) else exit_code_of(error))
            with suppress(Exception):
                add_note(error, *self._how_to_continue())
            raise
        self.close()
        return summary

    def describe(self) -> dict[str, Any]:
        """Print what run() prints before its first step, and what it would do next. Writes nothing. Collective."""
        try:
            self._introduce()
            for line in dry_run_lines(self.config, self.parts, plan=self.plan):
                self._output.say(line)
        finally:
            self.close()
        return {}

    def close(self, exit_code: int = 0) -> None:
        """Release what the run holds."""
        self.loop.saver.close(exit_code)
        self.loop.close()
        self.parts.close()
        self._output.leave_terminal()
        self.splits.close()
        if exit_code != LOST or self.communicator.endpoints is None:  # else it is closed after healing
            self._output.close()

    def _begin(self, message: str, since: float | None) -> None:
        """Write the files, records and lines that precede the first step. Collective."""
        communicator, output, first_step = self.communicator, self._output, self.plan.first_step
        if communicator.rank == 0:
            output.open_folder(self.parts, self.start)
            num_train, num_val = (split.num_samples for split in self.splits)
            job = describe_job(communicator, plan=self.plan, num_train=num_train, num_val=num_val)
            output.log("start", {"step": first_step, "job": job, **({"is_healed": True} if self._is_healed else {})})
        self.loop.noise.restore(self._rundir, communicator, timeout_seconds=self.config.run.checkpoint_timeout_seconds)
        if since is not None:
            waited = awake_seconds() - since
            message += f"; the others waited {waited:.1f} s"
            output.log("joined", {"step": first_step, "ranks": communicator.world_size, "seconds": waited})
        if message:
            output.hint(message, step=first_step)
        if not self._is_healed:
            self._introduce()

    def _introduce(self) -> None:
        num_train, num_val = (split.num_samples for split in self.splits)
        for line in introduction(
            self.config, self.parts, plan=self.plan, num_train=num_train, num_val=num_val, placement=self._placement
        ):
            self._output.say(line)

    def _train(self) -> tuple[Totals, float]:
        """Train the rest of the run; return totals, and the seconds of its steps and evaluations. Collective."""
        loop = self.loop
        try:
            record = self._evaluate_if_overdue()
            if self._is_healed:
                self._save_if_overdue()
            if loop.evaluator.reason_to_end():
                loop.plan = self.plan.without_steps()
            if not self._is_healed:  # or each loss would cost data.probe_seconds more
                self._measure_input()
            started = time.perf_counter()
            totals = loop.run(train_batches(self.config, self.splits.train, plan=self.plan, extra=loop.audit.extra))
            if totals.stopped_by is None and not totals.last_evaluation:  # resumed after its last step
                totals.last_evaluation = record or loop.evaluate(self.plan.num_steps)
            return totals, time.perf_counter() - started
        except Stopped:  # in an evaluation outside the training loop: nothing new to save
            return Totals(stopped_by=self.parts.stop.asked_by), 0.0
        except (ReplicasDiffer, Joining):  # the run may resume from what is being written
            loop.collect_checkpoint(wait=True)
            raise

    def _acknowledge(self, asked_by: str) -> None:
        self._output.say(
            f"{asked_by}: will save a checkpoint after this step, and stop (in an evaluation: at its next exchange, "
            f"{BATCHES_BETWEEN_EXCHANGES} batches at most)"
        )

    def _evaluate_if_overdue(self) -> dict[str, Any]:
        """Evaluate the resumed step, if an input failure prevented that before. Collective."""
        done = self.plan.first_step
        if not self.start.owes_evaluation or not self.plan.is_evaluation(done):
            return {}
        record = self.loop.evaluate(done)
        self.loop.save(done, record["top1"])
        self.loop.collect_checkpoint(wait=True)  # otherwise it would disturb the next measurement
        return record

    def _save_if_overdue(self) -> None:
        """Save the checkpoint that was due when a rank was lost, unless it is on disk. Collective."""
        done, plan = self.plan.first_step, self.plan
        if not (plan.is_evaluation(done) or plan.is_checkpoint(done)):
            return
        is_on_disk = write_on_first(
            lambda: str(any(each.step == done for each in list_checkpoints(self._rundir.checkpoints))),
            self.communicator.control,
            what="look for a checkpoint",
            timeout_seconds=self.config.run.checkpoint_timeout_seconds,
        )
        if is_on_disk == str(False):
            self.loop.save(done, self.start.evaluations.get(done, {}).get("top1"))

    def _measure_input(self) -> None:
        """Measure the input rate without training, and report it. Collective."""
        self._measured = measured = measure_input(
            self.config, self.communicator, self.splits.train, plan=self.plan, prepare=self.parts.prepare
        )
        if measured:
            self._output.say(describe_input(measured.ranks))
            self._output.log("input", input_record(measured.rates, step=self.plan.first_step))

    def _finish(self, totals: Totals, *, seconds: float) -> dict[str, Any] | None:
        """Write plot and summary on the first rank; return the summary on all, or None if stopped. Collective."""

        def write() -> str:
            summary = self._output.finish(
                totals,
                ended_by=self.loop.evaluator.reason_to_end() or "run.epochs",
                measured=self._measured,
                skipped=self.loop.skipped,
                seconds=seconds,
                noise=self.loop.noise.figures(),
                schedule=self.parts.schedule,
                is_healed=self._is_healed,
            )
            return as_json(summary)

        control, timeout_seconds = self.communicator.control, self.config.run.checkpoint_timeout_seconds
        text = write_on_first(write, control, what="plot and summary", timeout_seconds=timeout_seconds)
        found: dict[str, Any] | None = json.loads(text)
        return found

    def _how_to_continue(self) -> list[str]:
        """Return, on the first rank, the line that says how to continue; none if nothing was trained."""
        is_auto, newest = self.config.run.resume == "auto", list_checkpoints(self._rundir.checkpoints)[-1:]
        if self.communicator.rank != 0 or not (newest or (is_auto and self.loop.done)):
            return []
        if not newest:
            return ["no checkpoint is saved yet: the same command starts from the beginning"]
        return [f"{'' if is_auto else 'with --run.resume auto '}the same command continues from step {newest[0].step}"]
