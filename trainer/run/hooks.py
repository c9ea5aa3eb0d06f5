"""What others' code is told of a run, for those who train in Python."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """Holds functions that `bigbatch.train` calls, on every rank, with the same on all but an evaluation's own seconds.

    What one returns counts for nothing, and what it raises ends the run; a record is not to be changed. A run that goes
    back to a checkpoint, since its ranks' weights differ, tells of the steps after it again.
    """

    on_step: Callable[[int], None] = lambda done: None
    """(steps done), after each step, without waiting for the device: weights may still be on their way."""
    on_report: Callable[[dict[str, Any]], None] = lambda record: None
    """(record of metrics.jsonl), after every run.log_every_steps."""
    on_evaluation: Callable[[dict[str, Any], nn.Module], None] = lambda record, model: None
    """(record of metrics.jsonl, model), the model in evaluation mode, with the weights that were evaluated."""
    on_checkpoint: Callable[[Path], None] = lambda path: None
    """(folder of the checkpoint), when it is whole on the disk of rank 0: at a report some steps after its own."""
    on_end: Callable[[dict[str, Any]], None] = lambda summary: None
    """(summary of summary.json), of a run that was not stopped."""
