"""Where a run of a job starts, and how it is built from that: its parts with their state, and the loop of its steps."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import LOST, UserError
from bigbatch.parts import load
from bigbatch.trainer.build.compute import make_score
from bigbatch.trainer.build.images import Images, count_steps_per_epoch
from bigbatch.trainer.build.input import Splits, make_splits, read_microbatch
from bigbatch.trainer.build.model import is_whitened
from bigbatch.trainer.build.optimizer import stated_settings
from bigbatch.trainer.build.parts import make_parts, regroup_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.checkpoint.resume import ResumePoint, find_start, restore_, start_in_memory
from bigbatch.trainer.checkpoint.saving import CheckpointSaver, copy_to_host
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.evaluator import Evaluator, reason_to_end
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.folder.owner import Owner
from bigbatch.trainer.input.order import describe_left_out
from bigbatch.trainer.loop import TrainingLoop
from bigbatch.trainer.observe.observer import Observed, Observer, attach
from bigbatch.trainer.report.job_figures import JobFigures
from bigbatch.trainer.report.metrics import MetricsLog
from bigbatch.trainer.report.output import RunOutput
from bigbatch.trainer.step.plan import Parts
from bigbatch.trainer.step.stop_request import StopRequest

if TYPE_CHECKING:
    from bigbatch.comm.tuning.tuned import Tuned


@dataclass(frozen=True)
class JobRank:
    """Connection of a rank to its job, and what it did since."""

    communicator: Communicator
    env: ProcessEnv
    tuned: "Tuned | None"
    bound: str | None
    """Line for the log: the cores to which this process is bound."""
    staged: str | None = None
    """Line for the log: where the data was staged."""
    mode_note: str = ""
    """Line for the log: how compute.mode=auto chose."""

    def describe_placement(self, config: Config, splits: Splits, start: ResumePoint) -> list[str]:
        """Return lines for the log: how this process is placed, and where its data lies."""
        communicator, root = self.communicator, config.data.root
        left_out = describe_left_out(root, *(split.index for split in splits))
        lines = [left_out, self.bound, self.staged, self.mode_note]
        if config.run.heal == "in_place" and communicator.world_size > 1 and communicator.connection.endpoints is None:
            lines.append(load("bigbatch.trainer.healing.why_not_healing")(config, communicator.transport.backend.name))
        if start.is_of_unknown_classes:
            lines.append(f"{start.path} keeps no class names: those of {root} are not compared")
        if start.is_of_other_images:
            epoch = start.step / count_steps_per_epoch(config, num_samples=splits.train.num_samples)
            lines.append(
                f"{start.path} is of other training images: its step {start.step} is taken as epoch {epoch:.2f}"
            )
        if start.is_of_other_val:
            lines.append(f"{start.path} was evaluated on other validation images: no result before counts for the best")
        return [line for line in lines if line]


@contextmanager
def failing_as_lost_rank(env: ProcessEnv) -> Iterator[None]:
    """Give errors of a joining rank the exit code of a lost rank: the other ranks continue without it."""
    try:
        yield
    except UserError as error:
        if env.joins and error.exit_code:
            error.exit_code = LOST
        raise


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Everything that a run is built from."""

    config: Config
    job: JobRank
    log: MetricsLog
    figures: JobFigures = field(default_factory=JobFigures)
    """Figures of all runs of the job."""
    stop: StopRequest | None = None
    """The stop request of all runs of the job, which records signals also between two runs; None: a new one."""
    images: Images | None = None
    """Images of both splits, if already listed; staged data is."""
    splits: Splits | None = None
    state: dict[str, Any] | None = None
    """State in memory, equal on all ranks, from which the run continues."""
    parts: Parts | None = None
    """Parts of a former group, closed, which the run takes over; they need not hold the state."""
    is_in_parts: bool = False
    """Whether the parts hold the state."""
    message: str = ""
    """Why the run starts where it does, for the log."""
    check_until: int = 0
    """Step up to which the run looks for a rank whose gradients are not finite."""
    since: float | None = None
    """awake_seconds() when the ranks stopped for others to join."""

    def after(self, *, images: Images | None, stop: StopRequest) -> "RunStart":
        """Return what is left for the next run once a run has been built from this."""
        nothing: dict[str, Any] = {"splits": None, "parts": None, "is_in_parts": False, "check_until": 0}
        return replace(self, images=images, stop=stop, message="", since=None, **nothing)


@dataclass(frozen=True)
class BuiltRun:
    """A run that is ready to train."""

    communicator: Communicator
    loop: TrainingLoop
    splits: Splits
    start: ResumePoint
    placement: list[str]
    """Lines for the log on this process and its data."""
    is_healed: bool
    """Whether the run continues from a state in memory."""
    message: str
    since: float | None
    figures: JobFigures
    """As in RunStart."""


def build_run(
    begin: RunStart, *, owner: Owner | None = None, observers: Sequence[Observer] = (), is_quiet: bool = False
) -> BuiltRun:
    """Return a run that is ready to train. Collective. Raises: UserError.

    owner: of the run folder, on rank 0. observers: added to those that the config asks for.
    """
    config, job = begin.config, begin.job
    communicator = job.communicator
    splits = begin.splits or make_splits(config, communicator, listed=begin.images)
    train = splits.train
    start, state = _find_start(begin, splits)
    plan = make_plan(config, communicator, num_samples=train.num_samples, first_step=start.step)
    has_steps = start.step < plan.num_steps  # else its results stand
    if has_steps and start.evaluations and state.get("val_samples", splits.val.digest) != splits.val.digest:
        skipped = {name: why for name, why in start.skipped.items() if name.startswith("train/")}
        start = replace(start, is_of_other_val=True, owes_evaluation=True, evaluations={}, skipped=skipped)
    placement = job.describe_placement(config, splits, start)
    if start.evaluations and reason_to_end(list(start.evaluations.values()), config.run):  # the run has ended already
        plan = plan.without_steps()
    score = make_score(config, communicator.device)  # before the model: an error in it ends the run early
    make = (
        partial(regroup_parts, begin.parts)
        if begin.parts
        else partial(make_parts, tuned=job.tuned, classes=train.classes, train=train, is_restored=bool(state))
    )
    parts = make(config, communicator, plan=plan, gradient_order=start.gradient_order)
    with ExitStack() as failure:
        failure.callback(parts.close)  # the next run may take over the model, without these hooks
        stop = begin.stop or StopRequest(launcher=communicator.env.agent_pid)
        if state:
            path = start.path or Path("in memory")
            restore_(parts, state, path=path, stated=stated_settings(config.optimizer))
        elif begin.state is None and is_whitened(config):  # restored weights include their whitening
            fit_whitening_ = load("bigbatch.trainer.build.whitening.fit_whitening_")
            fit_whitening_(parts.model, train, config=config, communicator=communicator)
        digests = {"samples": train.digest, "val_samples": splits.val.digest}
        saver = CheckpointSaver(config, parts, communicator, owner=owner, digests=digests, classes=train.classes)
        saver.compare(done=plan.first_step)
        output = RunOutput(
            config, communicator, plan=plan, env=job.env, ask_to_stop=stop.ask, log=begin.log, is_quiet=is_quiet
        )
        observed = Observed(
            config=config,
            plan=plan,
            parts=parts,
            communicator=communicator,
            log=output.log,
            say=output.say,
            hint=output.hint,
            figures=begin.figures,
            read=partial(read_microbatch, config, train, plan),
        )
        found = attach(observed)
        if job.env.notice_seconds is not None:
            found.append(load("bigbatch.trainer.observe.notice.Notice")(observed, seconds=job.env.notice_seconds))
        if begin.check_until:  # first, so that it counts the run's own microbatches
            found.insert(
                0, load("bigbatch.trainer.observe.finite_check.FiniteCheck")(observed, until=begin.check_until)
            )
        loop = TrainingLoop(
            config,
            plan,
            parts,
            evaluator=Evaluator(
                config,
                parts,
                splits.val,
                communicator=communicator,
                leave_if_due=stop.leave_if_due,
                score=score,
                evaluations=start.evaluations,
            ),
            saver=saver,
            output=output,
            stop=stop,
            observers=[*found, *observers],
            skipped=dict(start.skipped),
        )
        if owner:  # the other ranks have taken part in collectives since they were told of it
            owner.confirm()
        failure.pop_all()
    # begin is not kept: its state is as large as the model and its momentum
    is_healed, figures = begin.state is not None, begin.figures
    return BuiltRun(communicator, loop, splits, start, placement, is_healed, begin.message, begin.since, figures)


def _find_start(begin: RunStart, splits: Splits) -> tuple[ResumePoint, dict[str, Any]]:
    """Return where all ranks start, and the state to restore. Collective. Raises: CheckpointError."""
    config, communicator, train = begin.config, begin.job.communicator, splits.train
    if begin.state is None:
        rundir, control = RunDir(Path(config.run.directory)), communicator.connection.control
        start, state = find_start(config, rundir, samples=train.digest, classes=train.classes, control=control)
    else:
        start = start_in_memory(begin.state, samples=train.digest, root=config.data.root)
        # the optimizer uses the copy's tensors, and the run may go back to those of begin.state
        state = {} if begin.is_in_parts else copy_to_host(begin.state)
    communicator.agree("the checkpoint to resume from", f"{start.path}, SHA-256 {start.sha256}")
    return start, state
