"""Build one run of a job: where it starts, its parts with their state, and the loop of its steps."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.build.images import Images
from bigbatch.trainer.build.input import Splits, make_splits, read_microbatch
from bigbatch.trainer.build.optimizer import stated_settings
from bigbatch.trainer.build.parts import make_parts, regroup_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.build.score import make_score
from bigbatch.trainer.build.whitening import fit_whitening_
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.evaluator import Evaluator, reason_to_end
from bigbatch.trainer.joined_rank import JoinedRank
from bigbatch.trainer.run.digests import DigestRecorder
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.gradient_audit import GradientAudit
from bigbatch.trainer.run.metrics import MetricsLog
from bigbatch.trainer.run.output import RunOutput
from bigbatch.trainer.run.owner import Owner
from bigbatch.trainer.run.resume import ResumePoint, find_start, restore_, start_in_memory
from bigbatch.trainer.run.saving import CheckpointSaver, copy_to_host
from bigbatch.trainer.step.plan import Parts
from bigbatch.trainer.step.stop_request import StopRequest
from bigbatch.trainer.training_loop import TrainingHooks, TrainingLoop
from bigbatch.trainer.training_run import TrainingRun


@dataclass(frozen=True)
class Inherited:
    """What a run takes over from an earlier run of its job, or from the work before the first one."""

    state: dict[str, Any] | None = None
    """State in memory, equal on all ranks, from which the run continues."""
    images: Images | None = None
    """Images of both splits, if already listed; staged data is."""
    splits: Splits | None = None
    parts: Parts | None = None
    """Parts of a former group, closed, which the run takes over; they need not hold the state."""
    is_in_parts: bool = False
    """Whether the parts hold the state."""
    stop: StopRequest | None = None
    log: MetricsLog | None = None


def build_run(
    config: Config, job: JoinedRank, *, owner: Owner | None, hooks: TrainingHooks, is_quiet: bool, inherited: Inherited
) -> TrainingRun:
    """Return a run that is ready to train. owner: of the run folder, on rank 0. Collective. Raises: UserError."""
    communicator = job.communicator
    splits = inherited.splits or make_splits(config, communicator, listed=inherited.images)
    train = splits.train
    start, state = _find_start(config, communicator, splits, inherited)
    placement = job.describe_placement(config, splits, start)
    plan = make_plan(config, communicator, num_samples=train.num_samples, first_step=start.step)
    if reason_to_end(list(start.evaluations.values()), config.run):  # the run has ended already
        plan = plan.without_steps()
    score = make_score(config, communicator.device)  # before the model: an error in it ends the run early
    make = (
        partial(regroup_parts, inherited.parts)
        if inherited.parts
        else partial(make_parts, tuned=job.tuned, classes=train.classes, train=train, is_restored=bool(state))
    )
    parts = make(config, communicator, plan=plan, gradient_order=start.gradient_order, stop=inherited.stop)
    with ExitStack() as failure:
        failure.callback(parts.close)  # the next run may take over the model, without these hooks
        if state:
            path = start.path or Path("in memory")
            restore_(parts, state, path=path, stated=stated_settings(config.optimizer))
        elif inherited.state is None:  # restored weights include their whitening
            fit_whitening_(parts.model, train, config=config, communicator=communicator)
        saver = CheckpointSaver(config, parts, owner=owner, samples=train.digest, classes=train.classes)
        saver.compare(done=plan.first_step)
        loop = TrainingLoop(
            config,
            plan,
            parts,
            evaluator=Evaluator(config, parts, splits.val, score=score, evaluations=start.evaluations),
            saver=saver,
            digests=DigestRecorder(config, plan, parts),  # before the progress bar: it may refuse a pattern
            audit=GradientAudit(config, plan, parts, read=partial(read_microbatch, config, train, plan)),
            output=RunOutput(
                config,
                communicator,
                plan=plan,
                env=job.env,
                ask_to_stop=parts.stop.ask,
                log=inherited.log or MetricsLog(RunDir(Path(config.run.directory))),
                is_quiet=is_quiet,
            ),
            hooks=hooks,
            notice_seconds=job.env.notice_seconds,
            skipped=dict(start.skipped),
        )
        if owner:  # the other ranks have taken part in collectives since they were told of it
            owner.confirm()
        failure.pop_all()
    # the state is not kept: it is as large as the model and its momentum
    is_healed = inherited.state is not None
    return TrainingRun(config, loop, splits=splits, start=start, placement=placement, is_healed=is_healed)


def _find_start(
    config: Config, communicator: Communicator, splits: Splits, inherited: Inherited
) -> tuple[ResumePoint, dict[str, Any]]:
    """Return where all ranks start, and the state to restore. Collective. Raises: CheckpointError."""
    train, kept = splits.train, inherited.state
    if kept is None:
        rundir, control = RunDir(Path(config.run.directory)), communicator.control
        start, state = find_start(config, rundir, samples=train.digest, classes=train.classes, control=control)
    else:
        start = start_in_memory(kept, samples=train.digest, root=config.data.root)
        # the optimizer uses the copy's tensors, and the run may go back to those of kept
        state = {} if inherited.is_in_parts else copy_to_host(kept)
    communicator.agree("the checkpoint to resume from", f"{start.path}, SHA-256 {start.sha256}")
    return start, state
