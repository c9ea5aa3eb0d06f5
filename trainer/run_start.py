"""Where a run starts: the rank in its job, and what the run takes over from the one before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import LOST, UserError
from bigbatch.parts import load
from bigbatch.trainer.build.images import Images
from bigbatch.trainer.build.input import Splits
from bigbatch.trainer.checkpoint.resume import ResumePoint
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.order import describe_left_out
from bigbatch.trainer.report.job_figures import JobFigures
from bigbatch.trainer.report.metrics import MetricsLog
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
