"""What loggers call a run: a sweep names its points, and their folder states it."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.files import parse_json, read_plain
from bigbatch.trainer.config.file import flatten
from bigbatch.trainer.config.kinds import flat_options
from bigbatch.trainer.folder.folder import RunDir

MAIN_KEYS = ("model.name", "optimizer.name", "schedule.base_lr", "batch.global_batch_size", "run.epochs", "run.seed")
"""Hyperparameters besides those in which a sweep's points differ."""
METRICS = ("eval/top1", "eval/loss")
"""Figures beside them."""
MAX_CHARACTERS = 200
"""Characters of a folder's name; file systems allow 255."""


@dataclass(frozen=True)
class RunName:
    """What loggers call a run."""

    name: str
    sweep: str = ""
    """Name of its sweep; empty if it has none."""
    folder: Path | None = None
    """Its sweep's folder."""
    keys: tuple[str, ...] = ()
    """Keys in which the sweep's points differ."""

    def events_folder(self, rundir: RunDir) -> Path:
        """Return the folder of TensorBoard's files: where the run has some, else named by sweep and point."""
        if not self.sweep:
            return rundir.tensorboard
        for events in (*rundir.tensorboard.glob("events.*"), *rundir.tensorboard.glob("*/events.*")):
            return events.parent
        name = re.sub(r"[^\w.+=-]+", "_", f"{self.sweep} {self.name}", flags=re.ASCII)
        return rundir.tensorboard / name[:MAX_CHARACTERS]

    def write_hparams(self, events: Any, stated: Mapping[str, Any], *, from_step: int) -> None:
        """Add a sweep's point to TensorBoard's table of hyperparameters; events: a SummaryWriter."""
        from torch.utils.tensorboard.summary import hparams

        known = flat_options(flatten(stated))
        values = {key: known[key] for key in (*MAIN_KEYS, *self.keys) if known.get(key) is not None}
        values = {
            key: each if isinstance(each, str | int | float | bool) else str(each) for key, each in values.items()
        }
        if self.sweep and from_step == 0:
            for summary in hparams(values, dict.fromkeys(METRICS, 0.0))[:2]:  # the third marks an end
                events._get_file_writer().add_summary(summary)


def name_of(rundir: RunDir) -> RunName:
    """Return the name that a sweep gave its point, by case, batch and seed; else that of the run folder."""
    path = rundir.path
    if path.parent.parent.name == "points":
        with suppress(OSError, ValueError, LookupError, TypeError):
            labels = parse_json(read_plain(path.parent / "point.json"))["labels"]
            name, sweep, keys = str(labels["run"]), str(labels["sweep"]), tuple(map(str, labels["keys"]))
            return RunName(name, sweep, path.parent.parent.parent, keys)
    return RunName(path.name)
