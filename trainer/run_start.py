"""Where a run of a job starts: what it takes over from the run before it, or from the work before the first one."""

from dataclasses import dataclass, replace
from typing import Any

from bigbatch.trainer.build.images import Images
from bigbatch.trainer.build.input import Splits
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.job_rank import JobRank
from bigbatch.trainer.report.metrics import MetricsLog
from bigbatch.trainer.step.plan import Parts
from bigbatch.trainer.step.stop_request import StopRequest


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Everything that a run is built from."""

    config: Config
    job: JobRank
    log: MetricsLog
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
    since: float | None = None
    """awake_seconds() when the ranks stopped for others to join."""

    def after(self, *, images: Images | None, stop: StopRequest) -> "RunStart":
        """Return what is left for the next run once a run has been built from this."""
        return replace(
            self, images=images, stop=stop, splits=None, parts=None, is_in_parts=False, message="", since=None
        )
