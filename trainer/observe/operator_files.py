"""Files for the operators of a cluster: metrics.prom, the newest figures, and events.jsonl, what happened and why."""

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bigbatch.errors import INTERRUPTED, CaptureFailed, GoingBack, PeerLostError, UserError, exit_code_of, first_line
from bigbatch.files import as_json, open_to_append, read_end
from bigbatch.trainer.folder.folder import RunDir, writing
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.observe.observer import Observed, Observer
from bigbatch.trainer.report.job_figures import JOINED, LOST
from bigbatch.trainer.step.stop_request import Joining
from bigbatch.words import is_number

METRICS = {
    "bigbatch_running": ("gauge", "1 while the run trains, 0 after its end"),
    "bigbatch_exit_code": ("gauge", "exit code of the run, after its end"),
    "bigbatch_ranks": ("gauge", "ranks of the job"),
    "bigbatch_step": ("gauge", "optimizer steps done"),
    "bigbatch_planned_steps": ("gauge", "steps of the whole run"),
    "bigbatch_epoch": ("gauge", "passes over the training set"),
    "bigbatch_loss": ("gauge", "training loss of the last report"),
    "bigbatch_top1_ratio": ("gauge", "top-1 of the last evaluation"),
    "bigbatch_images_per_second": ("gauge", "training rate of all ranks since the last report"),
    "bigbatch_input_wait_ratio": ("gauge", "share of the time in which steps waited for images"),
    "bigbatch_exposed_communication_ratio": ("gauge", "share of the time in which steps waited for sums"),
    "bigbatch_straggler_ratio": ("gauge", "share of the time in which ranks waited for slower ones"),
    "bigbatch_rank_losses_total": ("counter", "losses of ranks that this job survived"),
    "bigbatch_rank_joins_total": ("counter", "times that ranks joined this job"),
    "bigbatch_report_timestamp_seconds": ("gauge", "time of the last report, since 1970"),
    "bigbatch_checkpoint_step": ("gauge", "step of the newest checkpoint of this start"),
    "bigbatch_checkpoint_timestamp_seconds": ("gauge", "time when it was on disk, since 1970"),
}
"""Name -> type and help. The dashboard in examples/ queries these names."""
OF_RECORDS = {
    "bigbatch_epoch": "epoch",
    "bigbatch_loss": "loss",
    "bigbatch_images_per_second": "images_per_second",
    "bigbatch_input_wait_ratio": "input_wait_fraction",
    "bigbatch_exposed_communication_ratio": "exposed_communication_fraction",
    "bigbatch_straggler_ratio": "straggler_fraction",
}
"""Metric -> its field in the record of a report."""


class OperatorFiles(Observer):
    """Writes both files, on the first rank. A file that cannot be written is reported once, and does not end the run.

    events.jsonl is a file of its own, because metrics.jsonl loses the records after the step from which a run resumes.
    """

    def __init__(self, observed: Observed) -> None:
        self._observed, self._is_first = observed, observed.communicator.rank == 0
        self._rundir = RunDir(Path(observed.config.run.directory))
        self._events, self._metrics = self._rundir.path / "events.jsonl", self._rundir.path / "metrics.prom"
        self._run = os.path.abspath(self._rundir.path)  # of several users and work folders on one node
        self._step, self._has_warned = observed.plan.first_step, False
        self._values: dict[str, Any] = {
            "bigbatch_running": 1,
            "bigbatch_ranks": observed.communicator.world_size,
            "bigbatch_planned_steps": observed.plan.num_steps,
        }

    def start(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        counts = self._observed.figures.counts
        is_first = not any(counts.values())
        self._event(
            "start" if is_first else "healed",
            ranks=self._observed.communicator.world_size,
            host=socket.gethostname(),
            process=os.getpid(),
            **({} if is_first else {"rank_losses": counts[LOST], "rank_joins": counts[JOINED]}),
        )
        self._write()
        return batches

    def at_report(self, record: dict[str, Any]) -> None:
        self._step = record["step"]
        self._values |= {name: record.get(key) for name, key in OF_RECORDS.items()}
        self._values["bigbatch_report_timestamp_seconds"] = time.time()
        self._write()

    def at_evaluation(self, record: dict[str, Any], model: nn.Module) -> None:
        self._values["bigbatch_top1_ratio"] = record["top1"]
        self._write()

    def at_checkpoint(self, path: Path, *, step: int, seconds: float) -> None:
        self._values |= {"bigbatch_checkpoint_step": step, "bigbatch_checkpoint_timestamp_seconds": time.time()}
        self._event("saved", step=step, seconds=seconds, path=os.path.abspath(path))
        self._write()

    def ended(self, error: BaseException | None, *, stopped_by: str | None) -> None:
        if isinstance(error, Joining):  # the same job continues at once, with more ranks
            return
        if error is not None:
            several = self._observed.communicator.world_size > 1  # one rank has nothing to compare, and ends
            may_continue = isinstance(error, CaptureFailed) or (
                several and isinstance(error, PeerLostError | GoingBack)
            )
            kind = "lost" if isinstance(error, PeerLostError) else "interrupted" if may_continue else "ended"
            reason, code = first_line(error), exit_code_of(error)
        else:
            kind, reason = "ended", f"stopped by {stopped_by}" if stopped_by else "finished"
            code = INTERRUPTED if stopped_by else 0
        self._event(kind, reason=reason, exit_code=code)
        self._values |= {"bigbatch_running": 0, "bigbatch_exit_code": code}
        self._write()

    def _event(self, kind: str, **facts: Any) -> None:
        record = {"time": time.time(), "event": kind, "run": self._run, "step": self._step}
        self._try(lambda: self._append(as_json(record | facts)))

    def _append(self, line: str) -> None:
        with writing(self._events), open_to_append(self._events) as file:
            size = file.tell()
            # half a line is left by a full disk, or a node that lost power
            if size and read_end(self._events, start=size - 1) != "\n":
                line = f"\n{line}"
            file.write(f"{line}\n".encode())

    def _write(self) -> None:
        counts = self._observed.figures.counts
        totals = {"bigbatch_rank_losses_total": counts[LOST], "bigbatch_rank_joins_total": counts[JOINED]}
        values = self._values | totals | {"bigbatch_step": self._step}
        text = exposition(values, run=self._run)
        self._try(lambda: self._rundir.write_text(self._metrics, text))

    def _try(self, write: Any) -> None:
        if not self._is_first:
            return
        try:
            write()
        except UserError as error:
            if not self._has_warned:
                self._observed.say(f"run.operator_files: {first_line(error)}; the run continues")
            self._has_warned = True


def exposition(values: Mapping[str, Any], *, run: str) -> str:
    """Return finite values by name of METRICS in Prometheus' text format, with the run folder as a label."""
    escaped = re.sub(r'[\\"]', r"\\\g<0>", run).replace("\n", r"\n")
    lines = []
    for name, (kind, text) in METRICS.items():
        value = values.get(name)
        if value is not None and is_number(value):
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f'{name}{{run="{escaped}"}} {float(value)!r}']
    return "\n".join([*lines, ""])
