"""One training run: `bigbatch train`, and what `bigbatch.train` in Python does."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import ProcessEnv, read_process_env
from bigbatch.comm.tuning.tuned import Tuned
from bigbatch.errors import OutOfMemory, ReplicasDiffer, TrainingDiverged
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build import parts as build
from bigbatch.trainer.build.input_rates import measure_input
from bigbatch.trainer.build.optimizer import stated_settings
from bigbatch.trainer.build.score import make_score
from bigbatch.trainer.build.staging import stage_data
from bigbatch.trainer.build.whitening import fit_whitening_
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.stopping import METRICS
from bigbatch.trainer.inference.accuracy import BATCHES_BETWEEN_EXCHANGES, evaluate
from bigbatch.trainer.input.bad_images import require_few
from bigbatch.trainer.input.report import MeasuredInput, describe_input, input_record
from bigbatch.trainer.machine.memory import is_out_of_memory
from bigbatch.trainer.memory.out_of_memory import explain
from bigbatch.trainer.optim.foreign import eval_mode
from bigbatch.trainer.run.checkpoint import checkpoint_path, list_checkpoints, save_checkpoint, write_on_first
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.hooks import TrainingHooks
from bigbatch.trainer.run.notice import NoticeWatch
from bigbatch.trainer.run.output import RunOutput
from bigbatch.trainer.run.owner import Owner, owning
from bigbatch.trainer.run.resume import find_start, restore_
from bigbatch.trainer.run.stopping import reason_to_end
from bigbatch.trainer.run.summary import describe_job, introduction
from bigbatch.trainer.step.loop import train
from bigbatch.trainer.step.plan import Hooks, Parts, Plan
from bigbatch.trainer.step.replicas import compare
from bigbatch.trainer.step.stop_request import Stopped, leave_stopped
from bigbatch.trainer.step.totals import Totals


def main(argv: Sequence[str]) -> int:
    """Train the experiment that argv describes; the exit code. Collective over the job's ranks.

    Raises: UserError, such as OutOfMemory.
    """
    config = load_config(argv)
    is_dry_run = "--dry-run" in argv
    if is_dry_run:  # what would be copied, or measured and kept, is left alone
        config = replace(config, data=replace(config.data, stage=None), comm=replace(config.comm, calibrate="never"))
    env = read_process_env()
    job = join(config, env)
    summary = lead(config, job, is_dry_run=is_dry_run, is_quiet="--quiet" in argv)
    return leave_stopped(env) if summary is None else 0


@dataclass(frozen=True)
class Job:
    """Holds what a rank has of its job before it builds a run."""

    communicator: Communicator
    env: ProcessEnv
    tuned: Tuned | None
    bound: str | None
    """Where this process is kept, as a line for the log."""


def join(config: Config, env: ProcessEnv) -> Job:
    """Meet the other ranks. Collective. Raises: ConfigError; CommError; TunedError."""
    bound = build.bind_rank(config, env)
    kept = RunDir(Path(config.run.directory)).calibration
    communicator, tuned = build.join_job(config, env, kept_calibration=kept)
    return Job(communicator, env, tuned, bound)


def lead(
    config: Config,
    job: Job,
    *,
    watchers: TrainingHooks | None = None,
    is_dry_run: bool = False,
    is_quiet: bool = False,
) -> dict[str, Any] | None:
    """Do the run, and leave the job; its summary, empty of a dry run, None where it was stopped. Collective.

    Raises: UserError, such as OutOfMemory; the job is not left then.
    """
    communicator = job.communicator
    try:
        with ExitStack() as stack:
            owner = None if is_dry_run else own_folder(config, communicator, stack)
            make_run = partial(_Run, job=job, owner=owner, watchers=watchers or TrainingHooks(), is_quiet=is_quiet)
            summary = make_run(config).describe() if is_dry_run else _run_agreed(make_run, config)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error)
    else:
        communicator.close()
        return summary
    # after the error is gone, whose frames hold the run's tensors
    raise OutOfMemory(explain(config, reason, world_size=communicator.world_size, device=communicator.device))


def own_folder(config: Config, communicator: Communicator, stack: ExitStack) -> Owner | None:
    """Let the first rank own the run folder until stack ends, and the others know that it does. Collective.

    Raises: RunFolderError on the first rank where another job owns it, CheckpointError elsewhere.
    """
    owners: list[Owner] = []
    write_on_first(
        lambda: owners.append(stack.enter_context(owning(Path(config.run.directory)))),
        communicator.control,
        what="claim of the run folder",
        timeout_seconds=config.run.checkpoint_timeout_seconds,
    )
    return next(iter(owners), None)


def _run_agreed(make_run: Callable[[Config], "_Run"], config: Config) -> dict[str, Any] | None:
    """Train to the end or to a stop signal; the summary, or None where stopped. Collective.

    Where the ranks' weights differ on the way, go back to the newest checkpoint on which they agreed, or to where the
    run began.
    Raises: ReplicasDiffer where they differ as it starts, or again after it went back to the same step.
    """
    been_back_at: int | None = None
    came_back, asked_by = "", None
    while True:
        run = make_run(config)
        if asked_by:
            run.parts.stop.ask(asked_by)
        try:
            return run.run(came_back=came_back)
        except ReplicasDiffer as error:
            difference = str(error)
        # after the error is gone, whose frames hold the run's tensors
        asked_by = run.parts.stop.signal_name
        newest = next((c for c in reversed(list_checkpoints(run.rundir.checkpoints)) if c.is_agreed), None)
        back_at = newest.step if newest else run.plan.first_step
        if back_at == been_back_at:
            raise ReplicasDiffer(f"{difference}; it is so again since the run went back to step {back_at}")
        been_back_at = back_at
        came_back = f"{difference}; going back to step {back_at}"
        if newest:
            config = replace(config, run=replace(config.run, resume=str(newest.path)))
        del run


class _Run:
    """Leads one run through its life: files on the first rank, collectives on all."""

    def __init__(
        self, config: Config, *, job: Job, owner: Owner | None, watchers: TrainingHooks, is_quiet: bool
    ) -> None:
        communicator = job.communicator
        self.config = config
        self.owner = owner
        self.communicator = communicator
        self.watchers = watchers
        self.rundir = RunDir(Path(config.run.directory))
        self.is_first = communicator.rank == 0
        local, staged = stage_data(config, communicator)
        self.train_split, self.eval_split = build_input.make_splits(local, communicator)
        self.placement = [line for line in (job.bound, staged) if line]
        self.samples = build_input.samples_digest(self.train_split)
        # the state is not kept: it is as large as the model and its momentum
        self.start, state = find_start(config, self.rundir, samples=self.samples, control=communicator.control)
        start = self.start
        communicator.agree("the checkpoint to resume from", f"{start.path}, SHA-256 {start.sha256}")
        self.evaluations = dict(start.evaluations)
        """What the run's evaluations found, by step."""
        self.plan: Plan = build.make_plan(
            config, communicator, num_samples=self.train_split.num_samples, first_step=start.step
        )
        self._end_where_finished()
        self.score = make_score(config, communicator.device)
        self.guess_watch = build.make_guess_watch(config, self.plan)
        self.parts: Parts = build.make_parts(
            config, communicator, plan=self.plan, tuned=job.tuned, gradient_order=start.gradient_order
        )
        if start.path:
            restore_(self.parts, state, path=start.path, stated=stated_settings(config.optimizer))
        else:
            # restored weights bring theirs
            fit_whitening_(self.parts.model, self.train_split, config=config, communicator=communicator)
        self.compares = communicator.world_size > 1 and config.run.compare_every_steps > 0
        if self.compares:
            compare(self.parts, done=self.plan.first_step)
        self.output = RunOutput(
            config,
            communicator,
            plan=self.plan,
            terminal_columns=job.env.terminal_columns,
            ask_to_stop=self.parts.stop.ask,
            is_quiet=is_quiet,
        )
        self.notice_watch = (
            None if job.env.notice_seconds is None else NoticeWatch(notice_seconds=job.env.notice_seconds)
        )
        self.skipped = dict(start.skipped)
        """Grows with each bad picture that the run meets."""
        self.input: MeasuredInput | None = None

    def run(self, *, came_back: str = "") -> dict[str, Any] | None:
        """Train to the end or to a stop signal; the summary, or None where stopped. came_back: why it begins here."""
        summaries: list[dict[str, Any] | None] = []
        num_train, num_val = self.train_split.num_samples, self.eval_split.num_samples
        try:
            if self.is_first:
                self.output.open_folder(self.parts, self.start)
                job = describe_job(self.communicator, plan=self.plan, num_train=num_train, num_val=num_val)
                self.output.log("start", {"step": self.plan.first_step, "job": job})
            if came_back:
                self.output.say(came_back)
                self.output.log("hint", {"step": self.plan.first_step, "hint": came_back})
            self._introduce()
            with self.parts.stop.watch(self.communicator.control, acknowledge=self._acknowledge):
                try:
                    totals, seconds = self._train()
                except Stopped:  # in an evaluation before the first step or beside all steps: nothing is new
                    totals, seconds = Totals(stopped_by=self.parts.stop.asked_by), 0.0
            write_on_first(
                lambda: summaries.append(
                    self.output.finish(
                        totals,
                        ended_by=self._reason_to_end() or "run.epochs",
                        measured=self.input,
                        skipped=self.skipped,
                        seconds=seconds,
                    )
                ),
                self.communicator.control,
                what="plot and summary",
                timeout_seconds=self.config.run.checkpoint_timeout_seconds,
            )
        finally:
            self._close()
        if totals.stopped_by is not None:
            return None
        told = self.communicator.control.tell_all(
            json.dumps(summaries[0] if summaries else None),
            what="summary of the run",
            timeout_seconds=self.config.run.checkpoint_timeout_seconds,
        )
        return dict(json.loads(told))

    def describe(self) -> dict[str, Any]:
        """Say what run() says before its first step, and what it would then do. Writes nothing. Collective."""
        try:
            self._introduce()
            steps = range(self.plan.first_step + 1, self.plan.num_steps + 1)
            self.output.say(
                f"dry run: {len(steps)} steps, {self.plan.steps_per_epoch} in an epoch, with "
                f"{sum(map(self.plan.is_evaluation, steps))} evaluations, would go to {self.rundir.path}; nothing is "
                "trained, staged or written"
            )
        finally:
            self._close()
        return {}

    def _introduce(self) -> None:
        for line in introduction(
            self.config,
            self.parts,
            plan=self.plan,
            num_train=self.train_split.num_samples,
            num_val=self.eval_split.num_samples,
            placement=self.placement,
        ):
            self.output.say(line)

    def _close(self) -> None:
        self.parts.close()
        self.output.leave_terminal()
        self.train_split.loader.close()
        self.eval_split.loader.close()
        self.output.close()

    def _train(self) -> tuple[Totals, float]:
        """Do what is left of the run; its totals, and the seconds that its steps and evaluations took. Collective.

        Raises: Stopped, in an evaluation that is not the training loop's.
        """
        caught_up = self._catch_up()
        self._end_where_finished()
        self._measure_input()
        started = time.perf_counter()
        batches = build_input.train_batches(self.config, self.communicator, self.train_split, plan=self.plan)
        hooks = Hooks(
            self._report,
            self._evaluate,
            self._save,
            reason_to_end=self._reason_to_end,
            skipped=partial(self._skip, split="train"),
            before_step=self._record_timeline,
            after_step=self.watchers.on_step,
        )
        totals = train(self.plan, self.parts, hooks, batches)
        # a step after all others: what is still being recorded is written
        self._record_timeline(sys.maxsize)
        if totals.stopped_by is None and not totals.last_evaluation:  # resumed at its very end
            totals.last_evaluation = caught_up or self._evaluate(self.plan.num_steps)
        return totals, time.perf_counter() - started

    def _acknowledge(self, asked_by: str) -> None:
        self.output.say(
            f"{asked_by}: will save a checkpoint after this step, and stop (in an evaluation: at its next exchange, "
            f"{BATCHES_BETWEEN_EXCHANGES} batches at most)"
        )

    def _catch_up(self) -> dict[str, Any]:
        """Evaluate the step that the run goes on after, where the input failed when that was due. Collective."""
        done = self.plan.first_step
        if not self.start.owes_evaluation or not self.plan.is_evaluation(done):
            return {}
        record = self._evaluate(done)
        self.parts.set_lr_(step=done - 1)  # the checkpoint's own, as is all else in it
        self._save(done, record["top1"])
        return record

    def _record_timeline(self, step: int) -> None:
        """Record the steps that comm.timeline_steps names; after the last one rank 0 writes them. Collective."""
        if self.config.comm.timeline_steps is None:
            return
        first, last = self.config.comm.timeline_steps
        timeline = self.communicator.timeline
        was_active, is_active = timeline.is_active, first <= step <= last
        if was_active and not is_active:
            self.parts.precision.settle()  # what is still on its way is recorded as it ends
        timeline.is_active = is_active
        if was_active and not is_active:
            trace = self.communicator.gather_trace()
            if self.is_first:
                self.rundir.write_text(self.rundir.timeline, trace)
                self.output.say(f"timeline: open {self.rundir.timeline} in https://ui.perfetto.dev")

    def _measure_input(self) -> None:
        self.input = measure_input(
            self.config, self.communicator, self.train_split, plan=self.plan, prepare=self.parts.prepare
        )
        if self.input:
            self.output.say(describe_input(self.input.ranks))
            self.output.log("input", input_record(self.input.rates, step=self.plan.first_step))

    def _report(self, record: dict[str, Any]) -> None:
        self.output.report(record)
        if record["step"] - self.plan.first_step > self.plan.log_every_steps:  # the first steps compile and warm up
            self._watch_notice("step", self.plan.global_batch_size / record["images_per_second"], done=record["step"])
        if self.guess_watch:
            self.guess_watch.see(record)
        self.watchers.on_report(record)

    def _watch_notice(self, kind: str, seconds: float, *, done: int) -> None:
        """Say, once, where a stop takes longer than the job will grant it."""
        if self.notice_watch and (text := self.notice_watch.see(kind, seconds)):
            self.output.say(text)
            self.output.log("hint", {"step": done, "hint": text})

    def _skip(self, done: int, images: dict[int, str], *, split: str) -> None:
        """Note bad pictures for which others stood in. Raises: DataError where they are more than data.max_skipped."""
        named = {f"{split}/{position}": reason for position, reason in sorted(images.items())}
        new = {name: reason for name, reason in named.items() if name not in self.skipped}
        self.skipped |= new
        for reason in new.values():
            self.output.say(f"skipped: {reason}")
        if new:
            self.output.log("skipped", {"step": done, "pictures": new})
        require_few(list(self.skipped.values()), max_skipped=self.config.data.max_skipped)

    def _evaluate(self, done: int) -> dict[str, Any]:
        with self._showing(), self.parts.average.in_place_of_weights(done):
            record = evaluate(
                self.parts.model,
                build_input.eval_batches(self.config, self.communicator, self.eval_split),
                normalize=self.parts.normalize,
                communicator=self.communicator,
                num_samples=self.eval_split.num_samples,
                forward=self.parts.precision.forward,
                flip=self.config.data.eval_flip,
                score=self.score,
                skipped=partial(self._skip, done, split="val"),
                between_batches=self.parts.stop.leave_if_due,
            )
            self.evaluations[done] = {"step": done, **{metric: record[metric] for metric in METRICS}}
            record = {"step": done, "epoch": done / self.plan.steps_per_epoch, **record}
            self.output.evaluated(record)
            self.watchers.on_evaluation(record, self.parts.model)
        all_at_once = self.config.batch.microbatch_size * self.communicator.world_size
        num_batches = math.ceil(self.eval_split.num_samples / all_at_once)
        to_exchange = record["seconds"] * min(1.0, BATCHES_BETWEEN_EXCHANGES / num_batches)
        self._watch_notice("evaluation", to_exchange, done=done)
        return record

    def _end_where_finished(self) -> None:
        """Leave no step of a run whose evaluations ended it before."""
        if self._reason_to_end():
            self.plan = replace(self.plan, num_steps=self.plan.first_step)

    def _reason_to_end(self) -> str | None:
        run = self.config.run
        return reason_to_end(
            list(self.evaluations.values()),
            target_top1=run.target_top1,
            metric=run.stop_metric,
            after_evaluations=run.stop_after_evaluations,
        )

    def _save(self, done: int, top1: float | None) -> None:
        started = time.perf_counter()
        if not self.parts.precision.is_finite():  # the same bits, so the same verdict, on all ranks
            raise TrainingDiverged(
                f"the update of step {done} left weights that are not finite, which are not saved: lower "
                "schedule.base_lr or lengthen schedule.warmup_epochs"
            )
        if self.compares:
            compare(self.parts, done=done)
        with self._showing() as in_training:
            state = {
                "step": done,
                "config": dump_config(self.config),
                "model": self.parts.precision.model_state(),
                "in_training": in_training,
                "optimizer": self.parts.optimizer.state_dict(),
                "precision": self.parts.precision.state_dict(),
                "average": self.parts.average.state_dict(done),
                "evaluations": list(self.evaluations.values()),
                "gradient_order": "\n".join(self.parts.reducer.order),
                "samples": self.samples,
                "skipped": dict(self.skipped),
            }
            run = self.config.run
            write_on_first(
                lambda: self._write_checkpoint(state, step=done, top1=top1),
                self.communicator.control,
                what=f"checkpoint of step {done}",
                timeout_seconds=run.checkpoint_timeout_seconds,
            )
        self._watch_notice("checkpoint", time.perf_counter() - started, done=done)
        self.watchers.on_checkpoint(checkpoint_path(self.rundir.checkpoints, step=done))

    def _write_checkpoint(self, state: dict[str, Any], *, step: int, top1: float | None) -> None:
        if self.owner:
            self.owner.require()
        save_checkpoint(
            self.rundir.checkpoints,
            state,
            step=step,
            top1=top1,
            keep=self.config.run.keep_checkpoints,
            is_agreed=self.compares,
        )

    def _showing(self) -> AbstractContextManager[list[Tensor]]:
        """Show the weights that the optimizer means; the rest is as in eval_mode."""
        return eval_mode(self.parts.optimizer, on_change=self.parts.precision.write_half_)
