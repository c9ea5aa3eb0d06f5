"""One training run from the command line: `bigbatch train`."""

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.environ import ProcessEnv, read_process_env
from bigbatch.comm.tuned import Tuned
from bigbatch.trainer import build, build_input
from bigbatch.trainer.checkpoint import (
    best_checkpoint,
    list_checkpoints,
    load_checkpoint,
    require_free_disk,
    restoring,
    save_checkpoint,
    set_aside_after,
)
from bigbatch.trainer.config import Config
from bigbatch.trainer.config_file import dump_config, load_config
from bigbatch.trainer.data.bad_pictures import too_many
from bigbatch.trainer.errors import TrainingDiverged
from bigbatch.trainer.evaluation import evaluate
from bigbatch.trainer.input_report import MeasuredInput, describe_input, input_record
from bigbatch.trainer.loop import Hooks, Parts, Plan, Totals, set_lr_, train
from bigbatch.trainer.measure_input import measure_input
from bigbatch.trainer.metrics import MetricsLog, plot_run
from bigbatch.trainer.optim.param_groups import load_optimizer_state
from bigbatch.trainer.progress import Reporter, make_reporter
from bigbatch.trainer.resume import (
    changes,
    lacks_evaluation,
    require_same_pictures,
    require_same_samples,
    resume_path,
    skipped_before,
)
from bigbatch.trainer.rundir import RunDir, read_records, writing
from bigbatch.trainer.stage_data import stage_data
from bigbatch.trainer.summary import device_name, make_hints, make_summary

INTERRUPTED = 130
"""Exit code of a run that was asked to stop and saved a checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Train the experiment that argv describes; the exit code. Collective over the job's ranks."""
    config = load_config(argv)
    env = read_process_env()
    bound = build.bind_rank(config, env)
    communicator, tuned = build.join_job(config, env)
    code = _Run(config, communicator, env, tuned=tuned, bound=bound).run()
    communicator.close()
    return code


class _Run:
    """The life of one run: files on the first rank, collectives on all."""

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
        resume_from = resume_path(config, self.rundir)
        state = load_checkpoint(resume_from) if resume_from else None
        if state and config.run.resume == "auto":
            require_same_samples(state["config"], dump_config(config))
            require_same_pictures(state, build_input.samples_digest(self.train_split), root=config.data.root)
        first_step = int(state["step"]) if state else 0
        self.owes_evaluation = resume_from is not None and lacks_evaluation(resume_from, run=self.rundir)
        communicator.agree("the checkpoint to resume from", str(resume_from))
        self.plan: Plan = build.make_plan(
            config, communicator, num_samples=self.train_split.num_samples, first_step=first_step
        )
        order = state.get("gradient_order") if state else None  # decides how sums are rounded
        self.parts: Parts = build.make_parts(config, communicator, plan=self.plan, tuned=tuned, gradient_order=order)
        if state and resume_from:
            with restoring(resume_from):
                _restore(self.parts, state)
        self.say: Reporter = make_reporter(
            is_first_rank=self.is_first,
            terminal_columns=env.terminal_columns,
            first_step=first_step,
            num_steps=self.plan.num_steps,
        )
        self.skipped = skipped_before(state, build_input.samples_digest(self.train_split)) if state else {}
        """Bad pictures that the run has met, and why: train/3 is the fourth of the training pictures."""
        self.resumed_config: str | None = state["config"] if state else None
        self.log: MetricsLog | None = None
        self.input: MeasuredInput | None = None

    def run(self) -> int:
        """Train to the end or to a stop signal; the exit code."""
        hooks = Hooks(
            self._report,
            self._evaluate,
            self._save,
            skipped=partial(self._skip, split="train"),
            before_step=self._record_timeline,
        )
        try:
            if self.is_first:
                self._open_folder()
            self._introduce()
            caught_up = self._catch_up()
            self._measure_input()
            started = time.perf_counter()
            batches = build_input.train_batches(self.config, self.communicator, self.train_split, plan=self.plan)
            totals = train(self.plan, self.parts, hooks, batches)
            self._record_timeline(sys.maxsize)
            if totals.stopped_by is None and not totals.last_evaluation:  # resumed at its very end
                totals.last_evaluation = caught_up or self._evaluate(self.plan.num_steps)
            if self.is_first:
                self._finish(totals, seconds=time.perf_counter() - started)
        finally:
            self.say.close()
            self.train_split.loader.close()
            self.eval_split.loader.close()
            if self.log:
                self.log.close()
        return INTERRUPTED if totals.stopped_by else 0

    def _catch_up(self) -> dict[str, Any]:
        """Evaluate the step that the run goes on after, where the input failed when that was due. Collective."""
        done, plan = self.plan.first_step, self.plan
        if not self.owes_evaluation or (done % plan.eval_every_steps and done != plan.num_steps):
            return {}
        record = self._evaluate(done)
        set_lr_(self.parts, step=done - 1)  # the checkpoint's own, as is all else in it
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
                self.say.say(f"timeline: open {self.rundir.timeline} in https://ui.perfetto.dev")

    def _open_folder(self) -> None:
        """Everything that the first rank writes before the first step. Raises: CheckpointError; RunFolderError."""
        masters = self.parts.precision.masters.values()
        one_checkpoint = 2 * sum(m.numel() * m.element_size() for m in masters)  # weights and momentum
        num_kept = self.config.run.keep_checkpoints + 2  # the best, and the one that is being written
        require_free_disk(self.rundir.checkpoints, num_bytes=one_checkpoint * num_kept)
        if self.resumed_config and (changed := changes(self.resumed_config, dump_config(self.config))):
            self.say.say("resuming with a changed config: " + ", ".join(f"{k}={v}" for k, v in changed.items()))
        self.rundir.write_text(self.rundir.config, dump_config(self.config))
        for path in set_aside_after(self.rundir.checkpoints, step=self.plan.first_step):
            self.say.say(f"set aside as {path}: it is of a run that went on from an older checkpoint")
        if self.plan.first_step < self.plan.num_steps:
            self.rundir.summary.unlink(missing_ok=True)
        self.log = MetricsLog(self.rundir, from_step=self.plan.first_step)

    def _introduce(self) -> None:
        plan, batch = self.plan, self.config.batch
        for line in (
            f"{self.communicator}; device {device_name(self.communicator.device)}, {self.config.optimizer.precision}",
            f"{self.train_split.num_samples} training and {self.eval_split.num_samples} validation pictures; loader "
            f"{self.config.data.loader}",
            f"global batch {batch.global_batch_size} = {self.communicator.world_size} ranks x "
            f"{plan.accumulation_steps} microbatches x {batch.microbatch_size}, batch-norm span {batch.bn_span}; "
            f"{plan.num_steps} steps in {self.config.run.epochs} epochs",
            *str(self.parts.reducer.plan).splitlines(),
            *self.placement,
        ):
            self.say.say(line)
        if plan.first_step:
            self.say.say(f"resumed after step {plan.first_step}")

    def _measure_input(self) -> None:
        self.input = measure_input(self.config, self.communicator, self.train_split, plan=self.plan)
        if self.input:
            self.say.say(describe_input(self.input.ranks))
            if self.log:
                self.log.write("input", input_record(self.input.rates, step=self.plan.first_step))

    def _report(self, record: dict[str, Any]) -> None:
        self.say.advance(record)
        if self.log:
            self.log.write("train", record)

    def _skip(self, done: int, pictures: dict[int, str], *, split: str) -> None:
        """Bad pictures for which others stood in. Raises: DataError where they are more than data.max_skipped."""
        named = {f"{split}/{position}": reason for position, reason in sorted(pictures.items())}
        new = {name: reason for name, reason in named.items() if name not in self.skipped}
        self.skipped |= new
        for reason in new.values():
            self.say.say(f"skipped: {reason}")
        if new and self.log:
            self.log.write("skipped", {"step": done, "pictures": new})
        most = self.config.data.max_skipped or 0
        if len(self.skipped) > most:
            raise too_many(len(self.skipped), max_skipped=most, last=list(self.skipped.values())[-1])

    def _evaluate(self, done: int) -> dict[str, Any]:
        record = evaluate(
            self.parts.model,
            build_input.eval_batches(self.config, self.communicator, self.eval_split),
            normalize=self.parts.normalize,
            communicator=self.communicator,
            num_samples=self.eval_split.num_samples,
            flip=self.config.data.eval_flip,
            skipped=partial(self._skip, done, split="val"),
        )
        record = {"step": done, "epoch": done / self.plan.steps_per_epoch, **record}
        self.say.evaluated(record)
        if self.log:
            self.log.write("eval", record)
        return record

    def _save(self, done: int, top1: float | None) -> None:
        if not self.parts.precision.is_finite():  # the same bits, so the same verdict, on all ranks
            raise TrainingDiverged(
                f"the update of step {done} left weights that are no numbers, which are not saved: lower "
                "schedule.base_lr or lengthen schedule.warmup_epochs"
            )
        if not self.is_first:
            return
        state = {
            "step": done,
            "config": dump_config(self.config),
            "model": self.parts.precision.model_state(),
            "optimizer": self.parts.optimizer.state_dict(),
            "precision": self.parts.precision.state_dict(),
            "gradient_order": "\n".join(self.parts.reducer.order),
            "samples": build_input.samples_digest(self.train_split),
            "skipped": dict(self.skipped),
        }
        keep = self.config.run.keep_checkpoints
        save_checkpoint(self.rundir.checkpoints, state, step=done, top1=top1, keep=keep)

    def _finish(self, totals: Totals, *, seconds: float) -> None:
        """Plot, and summary or the way to go on."""
        title = f"{self.config.model.name}, global batch {self.config.batch.global_batch_size}"
        with writing(self.rundir.plot):
            plot_run(list(read_records(self.rundir.metrics)), self.rundir.plot, title=title)
        for text in make_hints(totals, self.config, measured=self.input):
            self.say.say(text)
            if self.log:
                self.log.write("hint", {"step": self.plan.first_step + totals.steps, "hint": text})
        if totals.stopped_by:
            newest = list_checkpoints(self.rundir.checkpoints)[-1]
            self.say.say(f"stopped by {totals.stopped_by}; saved {newest.path}; the same command goes on from there")
            return
        if totals.steps == 0 and self.rundir.summary.exists():
            self.say.say("this run was finished before; its summary:")
            summary = json.loads(self.rundir.summary.read_text())
        else:
            summary = make_summary(
                totals,
                self.config,
                communicator=self.communicator,
                plan=self.plan,
                measured=self.input,
                best=best_checkpoint(list_checkpoints(self.rundir.checkpoints)),
                skipped=self.skipped,
                seconds=seconds,
            )
            self.rundir.write_text(self.rundir.summary, json.dumps(summary, indent=1) + "\n")
        self.say.finish(summary)
        self.say.say(f"plot: {self.rundir.plot}")


def _restore(parts: Parts, state: dict[str, Any]) -> None:
    parts.precision.load_model_state(state["model"])
    load_optimizer_state(parts.optimizer, state["optimizer"])
    parts.precision.load_state_dict(state["precision"])
