"""Observers: parts that look at the steps, reports, evaluations and checkpoints of a run, if their key is set."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from bigbatch.comm.communicator import Communicator
from bigbatch.parts import load_named
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.report.job_figures import JobFigures
from bigbatch.trainer.step.plan import Parts, Plan

OBSERVERS = {
    "run.divergence_steps": "bigbatch.trainer.observe.guess_watch.GuessWatch",
    "comm.timeline_steps": "bigbatch.trainer.observe.timeline.TimelineRecorder",
    "run.compare_every_steps": "bigbatch.trainer.observe.replicas.Comparison",
    "run.reproducible": "bigbatch.trainer.observe.exact_sums.ExactSums",
    "run.digest_every_steps": "bigbatch.trainer.observe.digests.DigestRecorder",
    "run.noise_scale_every_steps": "bigbatch.trainer.observe.noise_recorder.NoiseRecorder",
    "run.audit_every_steps": "bigbatch.trainer.observe.gradient_audit.GradientAudit",
    "run.operator_files": "bigbatch.trainer.observe.operator_files.OperatorFiles",
}
"""Key of a config -> class, made with an Observed if the key is set."""

KEYS = (
    *("run.divergence_steps", "comm.timeline_steps", "run.compare_every_steps", "run.reproducible"),
    *("run.digest_every_steps", "run.noise_scale_every_steps", "run.audit_every_steps", "run.operator_files"),
)
"""All keys that ask for an observer, also without its entry above, in the order of the calls: an audit comes late."""
CHECKS = ("run.compare_every_steps", "run.reproducible")
"""Keys of observers that only end a run whose numbers are wrong; steps outside of a run have them, too."""
OF_SEVERAL_RANKS = ("run.compare_every_steps",)
"""Keys without effect on a job of one rank."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What an observer may use of a run."""

    config: Config
    plan: Plan
    parts: Parts
    communicator: Communicator
    say: Callable[[str], None]
    """Prints a line on rank 0."""
    log: Callable[[str, dict[str, Any]], None] = lambda kind, record: None
    """(kind, record): writes a line of metrics.jsonl on rank 0."""
    hint: Callable[..., None] = lambda text, step: None
    """(text, step=): prints it, and writes it into metrics.jsonl."""
    figures: JobFigures = field(default_factory=JobFigures)
    """Interruptions of the job so far."""
    read: Callable[[int, int], Batch] | None = None
    """(step, number of a microbatch) -> its batch; the run's own reading may end with it."""


class Observer:
    """Looks at a run. All ranks call all methods but close() in the same order; here they do nothing."""

    def start(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return this rank's batches to train on. Called once, after the run folder is open."""
        return batches

    def extra_microbatches(self, step: int) -> Sequence[int]:
        """Return the numbers of microbatches that this rank reads in a step after its own."""
        return ()

    def before_step(self, step: int) -> None:
        """step: counted from 0."""

    def before_update(self) -> None:
        """Called between the sums of the gradients and the change of the weights."""

    def after_step(self, done: int) -> None:
        """Called without a synchronization: the device may still compute the weights."""

    def before_report(self, done: int) -> None:
        """Called before the figures of a report are summed over ranks."""

    def figures(self, done: int) -> Mapping[str, Any]:
        """Return figures to add to the record of a report."""
        return {}

    def at_report(self, record: dict[str, Any]) -> None:
        """record: as in metrics.jsonl, which has it already."""

    def at_evaluation(self, record: dict[str, Any], model: nn.Module) -> None:
        """Called with the evaluated weights in the model."""

    def at_checkpoint(self, path: Path, *, step: int, seconds: float) -> None:
        """Called at the report after the checkpoint of that step is on disk; seconds: how long it took."""

    def end(self) -> None:
        """Called after the last step of a run that no error ended."""

    def summary(self) -> Mapping[str, Any]:
        """Return figures to add to the summary."""
        return {}

    def ended(self, error: BaseException | None, *, stopped_by: str | None) -> None:
        """Called once, at the end of the run: finished, stopped, or ended by an error that the job may survive."""

    def close(self) -> None:
        """Remove the hooks of a step that has not ended. Not collective."""


def calls(observers: Sequence[Observer], method: str) -> list[Callable[..., Any]]:
    """Return this method of each observer that has its own: what looks at no step is not entered in it."""
    return [getattr(each, method) for each in observers if getattr(type(each), method) is not getattr(Observer, method)]


def attach(observed: Observed, *, keys: Collection[str] = KEYS) -> list[Observer]:
    """Return the observers that a config asks for. keys: those that may be attached."""
    is_alone = observed.communicator.world_size == 1
    chosen = [key for key in KEYS if key in keys and lookup(observed.config, key)]
    needed = [key for key in chosen if not (is_alone and key in OF_SEVERAL_RANKS)]
    return [load_named(OBSERVERS, key, key="observer")(observed) for key in needed]
