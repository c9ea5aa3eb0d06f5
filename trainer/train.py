"""One training run from the command line: `bigbatch train`."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.conditions import source_commit
from bigbatch.comm.environ import ProcessEnv, read_process_env
from bigbatch.comm.tuned import Tuned
from bigbatch.trainer import build
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
from bigbatch.trainer.errors import CheckpointError, TrainingDiverged
from bigbatch.trainer.evaluation import evaluate
from bigbatch.trainer.loop import Hooks, Parts, Plan, Totals, train
from bigbatch.trainer.metrics import MetricsLog, plot_run
from bigbatch.trainer.optim.param_groups import load_optimizer_state
from bigbatch.trainer.progress import Reporter, make_reporter
from bigbatch.trainer.rundir import RunDir, read_records, writing

INTERRUPTED = 130
"""Exit code of a run that was asked to stop and saved a checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Train the experiment that argv describes; the exit code. Collective over the job's ranks."""
    config = load_config(argv)
    env = read_process_env()
    communicator, tuned = build.join_job(config, env)
    code = _Run(config, communicator, env, tuned=tuned).run()
    communicator.close()
    return code


class _Run:
    """The life of one run: files on the first rank, collectives on all."""

    def __init__(self, config: Config, communicator: Communicator, env: ProcessEnv, *, tuned: Tuned | None) -> None:
        self.config = config
        self.communicator = communicator
        self.rundir = RunDir(Path(config.run.directory))
        self.is_first = communicator.rank == 0
        self.train_split, self.eval_split = build.make_splits(config, communicator)
        resume_from = _resume_path(config, self.rundir)
        state = load_checkpoint(resume_from) if resume_from else None
        if state and config.run.resume == "auto":
            _require_same_samples(state["config"], dump_config(config))
        first_step = int(state["step"]) if state else 0
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
        self.resumed_config: str | None = state["config"] if state else None
        self.log: MetricsLog | None = None

    def run(self) -> int:
        """Train to the end or to a stop signal; the exit code."""
        hooks = Hooks(self._report, self._evaluate, self._save, before_step=self._record_timeline)
        try:
            if self.is_first:
                self._open_folder()
            self._introduce()
            started = time.perf_counter()
            batches = build.train_batches(self.config, self.communicator, self.train_split, plan=self.plan)
            totals = train(self.plan, self.parts, hooks, batches)
            self._record_timeline(sys.maxsize)
            if totals.stopped_by is None and not totals.last_evaluation:  # resumed at its very end
                totals.last_evaluation = self._evaluate(self.plan.num_steps)
            if self.is_first:
                self._finish(totals, seconds=time.perf_counter() - started)
        finally:
            self.say.close()
            self.train_split.loader.close()
            self.eval_split.loader.close()
            if self.log:
                self.log.close()
        return INTERRUPTED if totals.stopped_by else 0

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
        if self.resumed_config and (changed := _changes(self.resumed_config, dump_config(self.config))):
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
        ):
            self.say.say(line)
        if plan.first_step:
            self.say.say(f"resumed after step {plan.first_step}")

    def _report(self, record: dict[str, Any]) -> None:
        self.say.advance(record)
        if self.log:
            self.log.write("train", record)

    def _evaluate(self, done: int) -> dict[str, Any]:
        record = evaluate(
            self.parts.model,
            build.eval_batches(self.config, self.communicator, self.eval_split),
            normalize=self.parts.normalize,
            communicator=self.communicator,
            num_samples=self.eval_split.num_samples,
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
        }
        keep = self.config.run.keep_checkpoints
        save_checkpoint(self.rundir.checkpoints, state, step=done, top1=top1, keep=keep)

    def _finish(self, totals: Totals, *, seconds: float) -> None:
        """Plot, and summary or the way to go on."""
        title = f"{self.config.model.name}, global batch {self.config.batch.global_batch_size}"
        with writing(self.rundir.plot):
            plot_run(list(read_records(self.rundir.metrics)), self.rundir.plot, title=title)
        if totals.stopped_by:
            newest = list_checkpoints(self.rundir.checkpoints)[-1]
            self.say.say(f"stopped by {totals.stopped_by}; saved {newest.path}; the same command goes on from there")
            return
        if totals.steps == 0 and self.rundir.summary.exists():
            self.say.say("this run was finished before; its summary:")
            summary = json.loads(self.rundir.summary.read_text())
        else:
            summary = self._summary(totals, seconds=seconds)
            self.rundir.write_text(self.rundir.summary, json.dumps(summary, indent=1) + "\n")
        self.say.finish(summary)
        self.say.say(f"plot: {self.rundir.plot}")

    def _summary(self, totals: Totals, *, seconds: float) -> dict[str, Any]:
        """seconds, rates and shares are of this process, from its first step on; null if it had none to do."""
        images = totals.steps * self.config.batch.global_batch_size

        def per_second(amount: float) -> float | None:
            return amount / totals.step_seconds if totals.steps else None

        best = best_checkpoint(list_checkpoints(self.rundir.checkpoints))
        return {
            "top1": totals.last_evaluation["top1"],
            "top5": totals.last_evaluation["top5"],
            "best_top1": best.top1 if best else totals.last_evaluation["top1"],
            "epochs": self.config.run.epochs,
            "steps": self.plan.num_steps,
            "resumed_after_step": self.plan.first_step,
            "global_batch_size": self.config.batch.global_batch_size,
            "world_size": self.communicator.world_size,
            "images_per_second": per_second(images),
            "input_wait_fraction": per_second(totals.input_wait_seconds),
            "exposed_communication_fraction": per_second(totals.exposed_seconds),
            "seconds": seconds,
            "backend": self.communicator.backend.name,
            "algorithm": self.communicator.algorithm,
            "loader": self.config.data.loader,
            "precision": self.config.optimizer.precision,
            "device": device_name(self.communicator.device),
            "torch": torch.__version__,
            "commit": source_commit() or "unknown",
        }


def _resume_path(config: Config, rundir: RunDir) -> Path | None:
    """Which checkpoint to start from. Raises: CheckpointError when the folder is used and resume is never."""
    resume = config.run.resume
    if resume not in ("auto", "never"):
        return Path(resume)
    found = list_checkpoints(rundir.checkpoints)
    if found and resume == "never":
        raise CheckpointError(
            f"{rundir.path} holds a run already (step {found[-1].step}): choose another run.directory, or set "
            "run.resume to auto to go on"
        )
    return found[-1].path if found else None


def _restore(parts: Parts, state: dict[str, Any]) -> None:
    parts.precision.load_model_state(state["model"])
    load_optimizer_state(parts.optimizer, state["optimizer"])
    parts.precision.load_state_dict(state["precision"])


def _require_same_samples(old: str, new: str) -> None:
    """Raise CheckpointError where the steps done are not steps of this config: samples would repeat or be missed."""
    changed = _changes(old, new)
    if odd := [key for key in ("run.seed", "batch.global_batch_size") if key in changed]:
        raise CheckpointError(
            f"the run folder holds a run with another {odd[0]}: {changed[odd[0]]}. Choose another run.directory, or "
            "name the checkpoint to start from with --run.resume"
        )


def _changes(old: str, new: str) -> dict[str, str]:
    """What the new config states otherwise than the old one, leaving out where and how it is resumed."""
    before, after = (
        {f"{section}.{key}": value for section, values in yaml.safe_load(text).items() for key, value in values.items()}
        for text in (old, new)
    )
    where_and_how = ("run.directory", "run.resume")
    return {
        key: f"{value} (was {before.get(key)})"
        for key, value in after.items()
        if value != before.get(key) and key not in where_and_how
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU with the threads that a rank uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads a rank)"
