"""One training run from the command line: `bigbatch train`."""

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import ProcessEnv, read_process_env
from bigbatch.comm.tuning.tuned import Tuned
from bigbatch.errors import OutOfMemory, TrainingDiverged
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build import parts as build
from bigbatch.trainer.build.input_rates import measure_input
from bigbatch.trainer.build.optimizer import stated_settings
from bigbatch.trainer.build.staging import stage_data
from bigbatch.trainer.build.whitening import fit_whitening_
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.stopping import METRICS
from bigbatch.trainer.inference.accuracy import evaluate
from bigbatch.trainer.input.bad_images import require_few
from bigbatch.trainer.input.report import MeasuredInput, describe_input, input_record
from bigbatch.trainer.memory.largest_batch import is_out_of_memory
from bigbatch.trainer.memory.out_of_memory import explain
from bigbatch.trainer.optim.foreign import eval_mode
from bigbatch.trainer.run.checkpoint import save_checkpoint, write_on_first
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.output import RunOutput
from bigbatch.trainer.run.resume import find_start, restore_
from bigbatch.trainer.run.stopping import reason_to_end
from bigbatch.trainer.run.summary import describe_job, introduction
from bigbatch.trainer.step.loop import train
from bigbatch.trainer.step.plan import Hooks, Parts, Plan

INTERRUPTED = 130
"""Exit code of a run that was asked to stop and saved a checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Train the experiment that argv describes; the exit code. Collective over the job's ranks.

    Raises: UserError, such as OutOfMemory.
    """
    config = load_config(argv)
    env = read_process_env()
    bound = build.bind_rank(config, env)
    kept = RunDir(Path(config.run.directory)).calibration
    communicator, tuned = build.join_job(config, env, kept_calibration=kept)
    try:
        code = _Run(config, communicator, env, tuned=tuned, bound=bound).run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error)
    else:
        communicator.close()
        return code
    # after the error is gone, whose frames hold the run's tensors
    raise OutOfMemory(explain(config, reason, world_size=env.world_size, device=communicator.device))


class _Run:
    """Leads one run through its life: files on the first rank, collectives on all."""

    def __init__(
        self, config: Config, communicator: Communicator, env: ProcessEnv, *, tuned: Tuned | None, bound: str | None
    ) -> None:
        self.config = config
        self.communicator = communicator
        self.rundir = RunDir(Path(config.run.directory))
        self.is_first = communicator.rank == 0
        local, staged = stage_data(config, communicator)
        self.train_split, self.eval_split = build_input.make_splits(local, communicator)
        self.placement = [line for line in (bound, staged) if line]
        self.samples = build_input.samples_digest(self.train_split)
        # the state is not kept: it is as large as the model and its momentum
        self.start, state = find_start(config, self.rundir, samples=self.samples)
        start = self.start
        communicator.agree("the checkpoint to resume from", f"{start.path}, SHA-256 {start.sha256}")
        self.evaluations = dict(start.evaluations)
        """What the run's evaluations found, by step."""
        self.plan: Plan = build.make_plan(
            config, communicator, num_samples=self.train_split.num_samples, first_step=start.step
        )
        self._end_where_finished()
        self.guess_watch = build.make_guess_watch(config, self.plan)
        self.parts: Parts = build.make_parts(
            config, communicator, plan=self.plan, tuned=tuned, gradient_order=start.gradient_order
        )
        if start.path:
            restore_(self.parts, state, path=start.path, stated=stated_settings(config.optimizer))
        else:
            # restored weights bring theirs
            fit_whitening_(self.parts.model, self.train_split, config=config, communicator=communicator)
        self.output = RunOutput(config, communicator, plan=self.plan, terminal_columns=env.terminal_columns)
        self.skipped = dict(start.skipped)
        """Grows with each bad picture that the run meets."""
        self.input: MeasuredInput | None = None

    def run(self) -> int:
        """Train to the end or to a stop signal; the exit code."""
        num_train, num_val = self.train_split.num_samples, self.eval_split.num_samples
        hooks = Hooks(
            self._report,
            self._evaluate,
            self._save,
            reason_to_end=self._reason_to_end,
            skipped=partial(self._skip, split="train"),
            before_step=self._record_timeline,
        )
        try:
            if self.is_first:
                self.output.open_folder(self.parts, self.start)
                job = describe_job(self.communicator, plan=self.plan, num_train=num_train, num_val=num_val)
                self.output.log("start", {"step": self.plan.first_step, "job": job})
            for line in introduction(
                self.config,
                self.parts,
                plan=self.plan,
                num_train=num_train,
                num_val=num_val,
                placement=self.placement,
            ):
                self.output.say(line)
            caught_up = self._catch_up()
            self._end_where_finished()
            self._measure_input()
            started = time.perf_counter()
            batches = build_input.train_batches(self.config, self.communicator, self.train_split, plan=self.plan)
            totals = train(self.plan, self.parts, hooks, batches)
            # a step after all others: what is still being recorded is written
            self._record_timeline(sys.maxsize)
            if totals.stopped_by is None and not totals.last_evaluation:  # resumed at its very end
                totals.last_evaluation = caught_up or self._evaluate(self.plan.num_steps)
            if self.is_first:
                seconds = time.perf_counter() - started
                self.output.finish(
                    totals,
                    ended_by=self._reason_to_end() or "run.epochs",
                    measured=self.input,
                    skipped=self.skipped,
                    seconds=seconds,
                )
        finally:
            self.parts.close()
            self.output.leave_terminal()
            self.train_split.loader.close()
            self.eval_split.loader.close()
            self.output.close()
        return INTERRUPTED if totals.stopped_by else 0

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
        was_active, timeline.is_active = timeline.is_active, first <= step <= last
        if was_active and not timeline.is_active:
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
        if self.guess_watch:
            self.guess_watch.see(record)

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
                skipped=partial(self._skip, done, split="val"),
            )
        self.evaluations[done] = {"step": done, **{metric: record[metric] for metric in METRICS}}
        record = {"step": done, "epoch": done / self.plan.steps_per_epoch, **record}
        self.output.evaluated(record)
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
        if not self.parts.precision.is_finite():  # the same bits, so the same verdict, on all ranks
            raise TrainingDiverged(
                f"the update of step {done} left weights that are not finite, which are not saved: lower "
                "schedule.base_lr or lengthen schedule.warmup_epochs"
            )
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
                lambda: save_checkpoint(
                    self.rundir.checkpoints, state, step=done, top1=top1, keep=run.keep_checkpoints
                ),
                self.communicator.control,
                what=f"checkpoint of step {done}",
                timeout_seconds=run.checkpoint_timeout_seconds,
            )

    def _showing(self) -> AbstractContextManager[list[Tensor]]:
        """Show the weights that the optimizer means; the rest is as in eval_mode."""
        return eval_mode(self.parts.optimizer, on_change=self.parts.precision.write_half_)
