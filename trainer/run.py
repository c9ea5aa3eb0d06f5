"""Train one job, in time order: prepare, build a run, run it, and after an interruption build the next one."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigbatch.awake import awake_seconds
from bigbatch.errors import LOST, CaptureFailed, GoingBack, PeerLostError, add_note, exit_code_of
from bigbatch.files import as_json
from bigbatch.parts import load
from bigbatch.trainer.build.images import stage_data
from bigbatch.trainer.build.input import list_images, measure_input, train_batches
from bigbatch.trainer.build_run import BuiltRun, JobRank, RunStart, build_run
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.folder.ownership import Ownership, write_on_first
from bigbatch.trainer.input.report import MeasuredInput, describe_input, input_record
from bigbatch.trainer.input.stream import BATCHES_BETWEEN_EXCHANGES
from bigbatch.trainer.machine.host import free_memory
from bigbatch.trainer.observe.observer import Observer, calls
from bigbatch.trainer.recovery import make_recovery
from bigbatch.trainer.report.job_figures import JOINED, OTHER
from bigbatch.trainer.report.job_figures import LOST as LOST_RANK
from bigbatch.trainer.report.loggers import CLOSE_SECONDS
from bigbatch.trainer.report.metrics import MetricsLog
from bigbatch.trainer.report.summary import Ending, describe_job, introduction
from bigbatch.trainer.step.plan import Plan
from bigbatch.trainer.step.stop_request import Joining, Stopped
from bigbatch.trainer.step.window import Totals

USING_STAGED = "bigbatch.trainer.build.staging.using_staged"
CHOOSE_MODE = "bigbatch.trainer.build.compute_mode.choose_in_job"


class Training:
    """A job's training, to its end or to a stop signal. All methods are collective."""

    def __init__(
        self, config: Config, job: JobRank, *, observers: Sequence[Observer] = (), is_quiet: bool = False
    ) -> None:
        self._observers, self.is_quiet = observers, is_quiet
        self.start = RunStart(config=config, job=job, log=MetricsLog(RunDir(Path(config.run.directory))))
        """Where the present or next run starts."""

    def train(self) -> dict[str, Any] | None:
        """Train; return the summary, or None if stopped.

        Raises: PeerLostError; ReplicasDiffer if weights differ at the start, or again after the job went back;
        TrainingDiverged.
        """
        start, run = self.start, None
        user = load(USING_STAGED)(start.config) if start.config.data.stage else nullcontext()
        with user, Ownership(start.config) as ownership:
            recovery = make_recovery(start.config, joins=start.job.env.joins, ownership=ownership)
            if joined := recovery.enter(start):
                start = joined
            else:
                ownership.take(start.job.communicator.connection.control)
                start = prepare(start)
            while True:
                self.start = start
                try:
                    run = TrainingRun(
                        build_run(start, owner=ownership.owner, observers=self._observers, is_quiet=self.is_quiet)
                    )
                    self.start = start = start.after(images=run.splits.images, stop=run.loop.stop)
                    return run.run(wants_join=recovery.wants_join(start))
                except (PeerLostError, GoingBack, Joining, CaptureFailed) as error:
                    recovery.accept(error, start, run.loop if run else None)
                    start.figures.interrupt(run.loop.totals if run else Totals())
                    # of those that join, the recovery states a time; without it a rank was lost meanwhile
                    kind = LOST_RANK if isinstance(error, PeerLostError | Joining) else OTHER
                except BaseException:
                    if run is None:  # loggers of a former run may be open
                        start.log.close()
                    raise
                # only now: an error's frames held the run's tensors; the next step uses the host's memory again
                start = recovery.keep(start, run.loop if run else None)
                run = None
                free_memory(start.job.communicator.device, keeps_host=True)
                start = recovery.recover(start)
                start.figures.count(JOINED if start.since is not None else kind)


def prepare(start: RunStart) -> RunStart:
    """Stage and list the data, and choose the compute mode; return what the first run starts from. Collective."""
    config, communicator = start.config, start.job.communicator
    local, staged = stage_data(config, communicator.connection)
    images = list_images(local, communicator.connection)
    job = replace(start.job, staged=staged)
    if config.compute.mode != "eager" and communicator.device.type == "cuda":
        config, note = load(CHOOSE_MODE)(config, communicator)
        job = replace(job, mode_note=note)
    return replace(start, config=config, images=images, job=job)


class TrainingRun:
    """One run from start to end: files on the first rank, collectives on all."""

    def __init__(self, built: BuiltRun) -> None:
        self.loop, self.splits, self.start = built.loop, built.splits, built.start
        self.config, self.parts, self.communicator = built.loop.config, built.loop.parts, built.communicator
        self._built, self._is_healed, self._figures = built, built.is_healed, built.figures
        self._rundir, self.output = RunDir(Path(self.config.run.directory)), built.loop.output
        self._measured: MeasuredInput | None = None

    @property
    def plan(self) -> Plan:
        return self.loop.plan

    def run(self, *, wants_join: Callable[[], object] | None = None) -> dict[str, Any] | None:
        """Train to the end or a stop signal; return the summary, or None if stopped. Collective.

        wants_join: as of Recovery. Raises: Joining after all ranks have agreed on it.
        """
        loop, stop = self.loop, self.loop.stop
        try:
            self._begin()
            with stop.watch(self.communicator.connection.control, acknowledge=self._acknowledge, wants_join=wants_join):
                try:
                    record = self._before_steps()
                    self._figures.start_steps()
                    extra = loop.extra_microbatches if loop.observers else None
                    totals = loop.run(train_batches(self.config, self.splits.train, plan=self.plan, extra=extra))
                    if totals.stopped_by is None and not totals.last_evaluation:  # resumed after its last step
                        totals.last_evaluation = record or loop.evaluate(self.plan.num_steps)
                except Stopped:  # in an evaluation outside the training loop: nothing new to save
                    totals = Totals(stopped_by=stop.asked_by)
                except (GoingBack, Joining, CaptureFailed):  # the run may resume from what is being written
                    loop.collect_checkpoint(wait=True)
                    raise
            summary = self._finish(totals)
        except BaseException as error:
            self._tell_end(error)
            with suppress(Exception):  # the error that ended the run says more
                self.close(LOST if isinstance(error, Joining) else exit_code_of(error))
            with suppress(Exception):
                add_note(error, *self._how_to_continue())
            raise
        self._tell_end(None, stopped_by=totals.stopped_by)
        self.close()
        return summary

    def _tell_end(self, error: BaseException | None, *, stopped_by: str | None = None) -> None:
        for ended in calls(self.loop.observers, "ended"):
            ended(error, stopped_by=stopped_by)

    def close(self, exit_code: int = 0) -> None:
        """Release what the run holds."""
        self.loop.saver.close(exit_code)
        self.loop.close()
        self.parts.close()
        self.output.leave_terminal()
        self.splits.close()
        if exit_code != LOST or self.communicator.connection.endpoints is None:  # else it is closed after healing
            self.output.close()

    def _begin(self) -> None:
        """Write the files, records and lines that precede the first step. Collective."""
        communicator, output, first_step = self.communicator, self.output, self.plan.first_step
        after = self._figures.start_run(first_step)
        if communicator.rank == 0:
            output.open_folder(self.parts, self.start)
            num_train, num_val = (split.num_samples for split in self.splits)
            job = describe_job(communicator, self.parts, plan=self.plan, num_train=num_train, num_val=num_val)
            after |= {"is_healed": True} if self._is_healed else {}
            output.log("start", {"step": first_step, "job": job, **after})
        message = self._built.message
        if self._built.since is not None:
            waited = awake_seconds() - self._built.since
            message += f"; the others waited {waited:.1f} s"
            output.log("joined", {"step": first_step, "ranks": communicator.world_size, "seconds": waited})
        if message:
            output.hint(message, step=first_step)
        if not self._is_healed:
            self.introduce()

    def introduce(self) -> None:
        """Print the lines that precede the first step."""
        images, placement = [split.num_samples for split in self.splits], self._built.placement
        lines = introduction(
            self.config, self.parts, self.communicator, plan=self.plan, images=images, placement=placement
        )
        for line in lines:
            self.output.say(line)

    def _before_steps(self) -> dict[str, Any]:
        """Evaluate or save if overdue, and measure the input; return the record of an evaluation. Collective."""
        is_overdue = self.start.owes_evaluation and self.plan.is_evaluation(self.plan.first_step)
        record = self._evaluate_resumed() if is_overdue else {}
        if self._is_healed:
            self._save_if_overdue()
        if self.loop.evaluator.reason_to_end():
            self.loop.plan = self.plan.without_steps()
        if not self._is_healed:  # or each loss would cost data.probe_seconds more
            train, prepare = self.splits.train, self.parts.prepare
            self._measured = measure_input(self.config, self.communicator, train, plan=self.plan, prepare=prepare)
        if self._measured:
            self.output.say(describe_input(self._measured.ranks))
            self.output.log("input", input_record(self._measured.rates, step=self.plan.first_step))
        return record

    def _acknowledge(self, asked_by: str) -> None:
        self.output.say(
            f"{asked_by}: will save a checkpoint after this step, and stop (in an evaluation: at its next exchange, "
            f"{BATCHES_BETWEEN_EXCHANGES} batches at most)"
        )

    def _evaluate_resumed(self) -> dict[str, Any]:
        """Evaluate the resumed step, as an input failure prevented that before. Collective."""
        done = self.plan.first_step
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
            self.communicator.connection.control,
            what="look for a checkpoint",
            timeout_seconds=self.config.run.checkpoint_timeout_seconds,
        )
        if is_on_disk == str(False):
            self.loop.save(done, self.start.evaluations.get(done, {}).get("top1"))

    def _finish(self, totals: Totals) -> dict[str, Any] | None:
        """Write plot and summary on the first rank; return the summary on all, or None if stopped. Collective."""
        figures = self.loop.summary()

        def write() -> str:
            ended_by = self.loop.evaluator.reason_to_end() or "run.epochs"
            ending = Ending(ended_by, self._measured, self.loop.skipped, self._figures, figures, self._is_healed)
            summary = self.output.finish(totals, ending, schedule=self.parts.schedule)
            self.output.leave_terminal()
            self.output.close()  # loggers may send for a minute: the other ranks wait here
            return as_json(summary)

        control = self.communicator.connection.control
        limit = self.config.run.checkpoint_timeout_seconds + CLOSE_SECONDS
        text = write_on_first(write, control, what="plot and summary", timeout_seconds=limit)
        found: dict[str, Any] | None = json.loads(text)
        return found

    def _how_to_continue(self) -> list[str]:
        """Return, on the first rank, the line that says how to continue; none if nothing was trained."""
        if self.communicator.rank != 0:  # thousands of ranks would read all manifests at once
            return []
        is_auto, newest = self.config.run.resume == "auto", list_checkpoints(self._rundir.checkpoints)[-1:]
        if not (newest or (is_auto and self.loop.done)):
            return []
        if not newest:
            return ["no checkpoint is saved yet: the same command starts from the beginning"]
        return [f"{'' if is_auto else 'with --run.resume auto '}the same command continues from step {newest[0].step}"]
