"""One run from start to end: files on the first rank, collectives on all."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.awake import awake_seconds
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import HEALING
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.tuning.tuned import Tuned
from bigbatch.errors import ReplicasDiffer, add_note, exit_code_of
from bigbatch.exit_codes import LOST
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.input import measure_input
from bigbatch.trainer.build.optimizer import stated_settings
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.build.score import make_score
from bigbatch.trainer.build.whitening import fit_whitening_
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.evaluator import Evaluator, reason_to_end
from bigbatch.trainer.inference.accuracy import BATCHES_BETWEEN_EXCHANGES
from bigbatch.trainer.input.order import describe_left_out
from bigbatch.trainer.input.report import MeasuredInput, describe_input, input_record
from bigbatch.trainer.machine.host import describe_load
from bigbatch.trainer.run.checkpoint import list_checkpoints, write_on_first
from bigbatch.trainer.run.digests import DigestRecorder
from bigbatch.trainer.run.folder import RunDir, read_curves
from bigbatch.trainer.run.gradient_audit import GradientAudit
from bigbatch.trainer.run.metrics import MetricsLog
from bigbatch.trainer.run.output import RunOutput
from bigbatch.trainer.run.owner import Owner
from bigbatch.trainer.run.rank_memory import checkpoint_bytes, rank_bytes
from bigbatch.trainer.run.resume import Start, find_start, restore_, start_in_memory
from bigbatch.trainer.run.saving import CheckpointSaver
from bigbatch.trainer.run.summary import describe_job, introduction
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.stop_request import Joining, Stopped, StopRequest
from bigbatch.trainer.step.window import Totals
from bigbatch.trainer.training_loop import TrainingHooks, TrainingLoop


@dataclass(frozen=True)
class JoinedRank:
    """State of a rank before it builds a run."""

    communicator: Communicator
    env: ProcessEnv
    tuned: Tuned | None
    bound: str | None
    """Line for the log: the cores to which this process is bound."""
    staged: str | None = None
    """Line for the log: where the data was staged."""
    mode_told: str = ""
    """Line for the log: how compute.mode=auto chose."""
    mode_record: str = ""
    """Record of that choice, for the run folder."""


def why_not_healing(backend: str) -> str:
    """Return the log line that says why this run cannot heal in place."""
    if backend in HEALING:
        why, remedy = "the ranks met in a process group of the script's own", "without one they can"
    else:
        why, remedy = f"{backend} cannot go on without a rank", "comm.backend=tcp and gloo can"
    return f"run.heal=in_place: {why}, so a loss ends the job, as with restart; {remedy}"


class TrainingRun:
    """Controls one run from start to end: files on the first rank, collectives on all."""

    def __init__(
        self,
        config: Config,
        *,
        job: JoinedRank,
        owner: Owner | None,
        hooks: TrainingHooks,
        is_quiet: bool,
        kept: dict[str, Any] | None = None,
        stop: StopRequest | None = None,
        listed: build_input.Images | None = None,
        splits: tuple[build_input.Split, build_input.Split] | None = None,
        log: MetricsLog | None = None,
    ) -> None:
        """kept: a state in memory, equal on all ranks, from which the run continues after a loss.

        stop, log: those of the job's earlier run, if any. listed: the images, if already listed (staged data is).
        splits: if already made.
        """
        communicator = self.communicator = job.communicator
        self.config, self.is_first, self.is_healed = config, communicator.rank == 0, kept is not None
        self.rundir = RunDir(Path(config.run.directory))
        splits = splits or build_input.make_splits(config, communicator, listed=listed)
        self.train_split, self.eval_split = splits
        samples, classes = build_input.samples_digest(self.train_split), build_input.class_names(self.train_split)
        # the state is not kept: it is as large as the model and its momentum
        self.start, state = self._find_start(kept, samples=samples, classes=classes)
        start = self.start
        self.placement = self._describe_place(job)
        plan = make_plan(config, communicator, num_samples=self.train_split.num_samples, first_step=start.step)
        is_finished = reason_to_end(list(start.evaluations.values()), config.run) is not None
        self.plan: Plan = plan.ending_at_once() if is_finished else plan
        score = make_score(config, communicator.device)  # before the model: an error in it ends the run early
        self.parts: Parts = make_parts(
            config,
            communicator,
            plan=self.plan,
            tuned=job.tuned,
            gradient_order=start.gradient_order,
            classes=classes,
            stop=stop,
        )
        if state:
            path = start.path or Path("in memory")
            restore_(self.parts, state, path=path, stated=stated_settings(config.optimizer))
        else:
            # restored weights include their whitening
            fit_whitening_(self.parts.model, self.train_split, config=config, communicator=communicator)
        self.saver = CheckpointSaver(config, self.parts, owner=owner, samples=samples, classes=classes)
        self.saver.compare(done=self.plan.first_step)
        audit = GradientAudit(
            config,
            self.plan,
            self.parts,
            read=partial(build_input.read_microbatch, config, self.train_split, self.plan),
        )
        digests = DigestRecorder(config, self.plan, self.parts)  # before the progress bar: it may refuse a pattern
        self.output = RunOutput(
            config,
            communicator,
            plan=self.plan,
            env=job.env,
            ask_to_stop=self.parts.stop.ask,
            log=log or MetricsLog(self.rundir),
            mode_record=job.mode_record,
            is_quiet=is_quiet,
        )
        self.evaluator = Evaluator(config, self.parts, self.eval_split, score=score, evaluations=start.evaluations)
        self.loop = TrainingLoop(
            config,
            self.plan,
            self.parts,
            evaluator=self.evaluator,
            saver=self.saver,
            output=self.output,
            digests=digests,
            audit=audit,
            hooks=hooks,
            notice_seconds=job.env.notice_seconds,
            skipped=dict(start.skipped),
        )
        self.input: MeasuredInput | None = None

    def _find_start(
        self, kept: dict[str, Any] | None, *, samples: str | None, classes: Sequence[str] | None
    ) -> tuple[Start, dict[str, Any]]:
        """Return where all ranks start, and the state to restore. Collective. Raises: CheckpointError."""
        config, control = self.config, self.communicator.control
        if kept is None:
            start, state = find_start(config, self.rundir, samples=samples, classes=classes, control=control)
        else:
            start, state = start_in_memory(kept, samples=samples, root=config.data.root), kept
        self.communicator.agree("the checkpoint to resume from", f"{start.path}, SHA-256 {start.sha256}")
        return start, state

    def _describe_place(self, job: JoinedRank) -> list[str]:
        """Return lines for the log: how this process is placed, and where its data lies."""
        config, communicator = self.config, self.communicator
        left_out = describe_left_out(config.data.root, self.train_split.index, self.eval_split.index)
        lines = [left_out, job.bound, job.staged, describe_load(communicator.device), job.mode_told]
        if config.run.heal == "in_place" and communicator.world_size > 1 and communicator.endpoints is None:
            lines.append(why_not_healing(communicator.backend.name))
        if self.start.is_of_unknown_classes:
            lines.append(f"{self.start.path} keeps no class names: those of {config.data.root} are not compared")
        return [line for line in lines if line]

    @property
    def listed(self) -> build_input.Images | None:
        return build_input.images_of((self.train_split, self.eval_split))

    def run(
        self,
        *,
        came_back: str = "",
        since: float | None = None,
        wants_join: Callable[[], object] = lambda: False,
    ) -> dict[str, Any] | None:
        """Train to the end or a stop signal; return the summary, or None if stopped.

        came_back: why the run starts at this step. since: awake_seconds() when the ranks stopped for others to join.
        wants_join: returns a true value if other ranks want to join. Raises: Joining after all ranks have agreed on it.
        """
        num_train, num_val = self.train_split.num_samples, self.eval_split.num_samples
        timeout_seconds = self.config.run.checkpoint_timeout_seconds
        try:
            if self.is_first:
                self.output.open_folder(self.parts, self.start)
                job = describe_job(self.communicator, plan=self.plan, num_train=num_train, num_val=num_val)
                healed = {"is_healed": True} if self.is_healed else {}
                self.output.log("start", {"step": self.plan.first_step, "job": job, **healed})
            self.loop.noise.go_on(self.rundir, self.communicator, timeout_seconds=timeout_seconds)
            if since is not None:
                waited = awake_seconds() - since
                came_back += f"; the others waited {waited:.1f} s"
                ranks = self.communicator.world_size
                self.output.log("joined", {"step": self.plan.first_step, "ranks": ranks, "seconds": waited})
            if came_back:
                self.output.hint(came_back, step=self.plan.first_step)
            if not self.is_healed:
                self._introduce()
            control = self.communicator.control
            with self.parts.stop.watch(control, acknowledge=self._acknowledge, wants_join=wants_join):
                try:
                    totals, seconds = self._train()
                except Stopped:  # in an evaluation outside the training loop: nothing new to save
                    totals, seconds = Totals(stopped_by=self.parts.stop.asked_by), 0.0
                except (ReplicasDiffer, Joining):  # the run may resume from what is being written
                    self.loop.settle(wait=True)
                    raise
            summary = write_on_first(
                lambda: json.dumps(
                    self.output.finish(
                        totals,
                        ended_by=self.evaluator.reason_to_end() or "run.epochs",
                        measured=self.input,
                        skipped=self.loop.skipped,
                        seconds=seconds,
                        noise=self.loop.noise.figures(),
                        schedule=self.parts.schedule,
                        is_healed=self.is_healed,
                    )
                ),
                self.communicator.control,
                what="plot and summary",
                timeout_seconds=timeout_seconds,
            )
        except BaseException as error:
            with suppress(Exception):  # the error that ended the run says more
                self.close(LOST if isinstance(error, Joining) else exit_code_of(error))
            with suppress(Exception):
                add_note(error, *self._where_it_continues())
            raise
        self.close()
        found: dict[str, Any] | None = json.loads(summary)
        return found

    def _where_it_continues(self) -> list[str]:
        """Return, on the first rank, the line that says how to continue; none if nothing was trained."""
        is_auto, newest = self.config.run.resume == "auto", list_checkpoints(self.rundir.checkpoints)[-1:]
        if not self.is_first or not (newest or (is_auto and self.loop.done)):
            return []
        if not newest:
            return ["no checkpoint is saved yet: the same command starts from the beginning"]
        return [f"{'' if is_auto else 'with --run.resume auto '}the same command continues from step {newest[0].step}"]

    def describe(self) -> dict[str, Any]:
        """Print what run() prints before its first step, and what it would do next. Writes nothing. Collective."""
        try:
            self._introduce()
            steps = range(self.plan.first_step + 1, self.plan.num_steps + 1)
            self.output.say(
                f"dry run: {len(steps)} steps, {self.plan.steps_per_epoch} in an epoch, with "
                f"{sum(map(self.plan.is_evaluation, steps))} evaluations, would go to {self.rundir.path}; nothing is "
                "trained, staged or written"
            )
            rates = [r["images_per_second"] for r in read_curves(self.rundir.metrics) if r["kind"] == "train"]
            per_epoch = self.plan.steps_per_epoch * self.plan.global_batch_size
            known = f"{per_epoch / statistics.median(rates):.3g} s, by its reports so far" if rates else ""
            self.output.say(
                f"memory of a rank: {rank_bytes(self.config, self.parts) / 1e6:.3g} MB of weights, gradients and "
                "optimizer state, and activations; of a checkpoint: "
                f"{checkpoint_bytes(self.config, self.parts) / 1e6:.3g} MB"
            )
            self.output.say(f"time of an epoch's steps: {known or 'not known yet'}")
        finally:
            self.close()
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

    def close(self, exit_code: int = 0) -> None:
        """Release what the run holds."""
        self.saver.close(exit_code)
        self.parts.close()
        self.output.leave_terminal()
        self.train_split.loader.close()
        self.eval_split.loader.close()
        if exit_code != LOST or self.communicator.endpoints is None:  # else it is closed after healing
            self.output.close()

    def _train(self) -> tuple[Totals, float]:
        """Train the rest of the run; return totals, and the seconds of its steps and evaluations. Collective.

        Raises: Stopped in an evaluation outside the training loop.
        """
        loop = self.loop
        caught_up = self._catch_up()
        if self.is_healed:
            self._save_if_due()
        if self.evaluator.reason_to_end():
            self.plan = loop.plan = self.plan.ending_at_once()
        if not self.is_healed:  # or each loss would cost data.probe_seconds more
            self.input = measure_input(
                self.config, self.communicator, self.train_split, plan=self.plan, prepare=self.parts.prepare
            )
        if self.input:
            self.output.say(describe_input(self.input.ranks))
            self.output.log("input", input_record(self.input.rates, step=self.plan.first_step))
        started = time.perf_counter()
        batches = build_input.train_batches(self.config, self.train_split, plan=self.plan, extra=loop.audit.extra)
        totals = loop.run(batches)
        if totals.stopped_by is None and not totals.last_evaluation:  # resumed after its last step
            totals.last_evaluation = caught_up or loop.evaluate(self.plan.num_steps)
        return totals, time.perf_counter() - started

    def _acknowledge(self, asked_by: str) -> None:
        self.output.say(
            f"{asked_by}: will save a checkpoint after this step, and stop (in an evaluation: at its next exchange, "
            f"{BATCHES_BETWEEN_EXCHANGES} batches at most)"
        )

    def _save_if_due(self) -> None:
        """Save the checkpoint that was due when a rank was lost, unless it is on disk. Collective."""
        done, plan = self.plan.first_step, self.plan
        if not (plan.is_evaluation(done) or plan.is_checkpoint(done)):
            return
        told = write_on_first(
            lambda: str(any(each.step == done for each in list_checkpoints(self.rundir.checkpoints))),
            self.communicator.control,
            what="look for a checkpoint",
            timeout_seconds=self.config.run.checkpoint_timeout_seconds,
        )
        if told == str(False):
            self.loop.save(done, self.start.evaluations.get(done, {}).get("top1"))

    def _catch_up(self) -> dict[str, Any]:
        """Evaluate the resumed step, if an input failure prevented that before. Collective."""
        done = self.plan.first_step
        if not self.start.owes_evaluation or not self.plan.is_evaluation(done):
            return {}
        record = self.loop.evaluate(done)
        self.loop.save(done, record["top1"])
        self.loop.settle(wait=True)  # otherwise it would disturb the next measurement
        return record
