"""Callbacks for `bigbatch.train` in Python."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """Functions that `bigbatch.train` calls on every rank, with equal arguments except an evaluation's seconds.

    Return values are ignored, exceptions end the run, and records must not be changed. A run that returns to a
    checkpoint because its ranks' weights differ calls them again for the steps after it.
    """

    on_step: Callable[[int], None] = lambda done: None
    """(steps done), after each step, without synchronizing: the device may still compute the weights."""
    on_report: Callable[[dict[str, Any]], None] = lambda record: None
    """(record of metrics.jsonl), after every run.log_every_steps."""
    on_evaluation: Callable[[dict[str, Any], nn.Module], None] = lambda record, model: None
    """(record of metrics.jsonl, model), in evaluation mode with the evaluated weights."""
    on_checkpoint: Callable[[Path], None] = lambda path: None
    """(folder of the checkpoint), after rank 0 has written it: at a report some steps later."""
    on_end: Callable[[dict[str, Any]], None] = lambda summary: None
    """(contents of summary.json), at the end of a run that was not stopped."""
