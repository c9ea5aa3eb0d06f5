"""What a job does after an interruption of a run: run.heal names a recovery, which finds where the next run starts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from bigbatch.errors import CaptureFailed, GoingBack, NotFinite, PeerLostError, ReplicasDiffer, add_note, notes_of
from bigbatch.parts import load_named
from bigbatch.trainer.build_run import RunStart
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.folder.ownership import Ownership
from bigbatch.trainer.loop import TrainingLoop
from bigbatch.trainer.step.stop_request import Joining

RECOVERIES = {"restart": "bigbatch.trainer.recovery.Restart", "in_place": "bigbatch.trainer.healing.InPlace"}
"""Value of run.heal -> class, made with the ownership of the run folder."""
Interruption = PeerLostError | GoingBack | Joining | CaptureFailed


class Recovery(Protocol):
    """Recovers a job from interruptions. All methods are collective over the ranks that are left."""

    def enter(self, start: RunStart) -> RunStart | None:
        """Join a running job, if this rank does; else return None."""

    def wants_join(self, start: RunStart) -> Callable[[], object] | None:
        """Return what returns a true value, on a thread, if other ranks want to join the run; None if none can."""

    def accept(self, error: Interruption, start: RunStart, loop: TrainingLoop | None) -> None:
        """Note why the loop was interrupted, which is None if building it was. Keeps none of the error's frames.

        Raises: the error if the job cannot recover.
        """

    def keep(self, start: RunStart, loop: TrainingLoop | None) -> RunStart:
        """Return the start with what recover() may use of the interrupted loop. Called once the error is gone."""

    def recover(self, start: RunStart) -> RunStart:
        """Return where the next run starts, after keep(). Raises: UserError."""


class Restart:
    """Ends the job if a rank is lost: its launcher may start it again.

    If the ranks' weights differ, the next run starts at the newest checkpoint on which they agreed, or at the start of
    the interrupted run. So it does if numbers are not finite, and looks for a rank whose device is the cause. If a step
    could not be captured, the next run continues before it, without a CUDA graph.
    """

    def __init__(self, ownership: Ownership) -> None:
        self.back_at: int | None = None
        """Step to which the job last went back because weights differed, or were not finite."""
        self._difference: GoingBack = ReplicasDiffer()
        self._first_step = self.check_until = 0
        self._uncaptured = ""

    def enter(self, start: RunStart) -> RunStart | None:
        return None

    def wants_join(self, start: RunStart) -> None:
        return None

    def accept(self, error: Interruption, start: RunStart, loop: TrainingLoop | None) -> None:
        """Raises: the error, unless weights differ, numbers are not finite, or a step could not be captured."""
        self._uncaptured = ""
        if isinstance(error, CaptureFailed):
            if loop is None or start.config.optimizer.sharded:
                raise CaptureFailed(f"{error}: set compute.cuda_graph=false")
            self._uncaptured = f"{error}; continuing from step {loop.done} without a CUDA graph"
        elif loop is None or not isinstance(error, GoingBack):
            raise error
        else:
            until, parts = 0 if isinstance(error, ReplicasDiffer) else loop.done, loop.parts
            if isinstance(error, NotFinite) and (parts.communicator.world_size == 1 or parts.precision.skips_overflow):
                raise error
            self._difference = type(error)(*error.args)  # without frames
            add_note(self._difference, *notes_of(error))
            self._first_step, self.check_until = loop.plan.first_step, error.check_until or until

    def keep(self, start: RunStart, loop: TrainingLoop | None) -> RunStart:
        if not self._uncaptured or loop is None:
            return start
        return replace(_without_graph(start), state=loop.copy_state())

    def recover(self, start: RunStart) -> RunStart:
        """Go back. Raises: ReplicasDiffer or NotFinite if the job went back to the same step before."""
        if self._uncaptured:
            return replace(start, message=self._uncaptured, since=None)
        checkpoints = list_checkpoints(RunDir(Path(start.config.run.directory)).checkpoints)
        newest = next((c for c in reversed(checkpoints) if c.is_agreed), None)
        step = newest.step if newest else self._first_step
        if step == self.back_at:
            again = type(self._difference)(
                f"{self._difference}; this happened again after the run went back to step {step}"
            )
            add_note(again, *notes_of(self._difference))
            raise again
        self.back_at = step
        message = f"{self._difference}; going back to step {step}"
        if self.check_until > step:
            message += f", and checking each rank's gradients up to step {self.check_until}"
            if start.config.compute.cuda_graph:
                message += ", from here on without a CUDA graph"
            start = _without_graph(start)  # a captured step hides them from Python
        start = replace(start, message=message, since=None, check_until=self.check_until)
        return resuming(replace(start, state=None), str(newest.path)) if newest else start


def _without_graph(start: RunStart) -> RunStart:
    compute = replace(start.config.compute, cuda_graph=False)
    return replace(start, config=replace(start.config, compute=compute))


def resuming(start: RunStart, checkpoint: str) -> RunStart:
    """Return the start with another run.resume."""
    return replace(start, config=replace(start.config, run=replace(start.config.run, resume=checkpoint)))


def make_recovery(config: Config, *, joins: bool, ownership: Ownership) -> Recovery:
    """Return the recovery of a config. joins: this process joins a running job, which only a job in place takes in."""
    recovery: Recovery = load_named(RECOVERIES, "in_place" if joins else config.run.heal, key="run.heal")(ownership)
    return recovery
