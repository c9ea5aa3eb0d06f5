"""Where numbers go: metrics.jsonl, TensorBoard, the plot."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigbatch.trainer.run.folder import RunDir, read_records, writing


class MetricsLog:
    """Appends records to metrics.jsonl and their numbers to TensorBoard.

    A resumed run first drops the records after the step it resumes from, and those that earlier starts from this step
    left at once, so that none stands twice.
    """

    def __init__(self, rundir: RunDir, *, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        kept = [record for record in read_records(rundir.metrics) if _stays(record, from_step=from_step)]
        rundir.write_text(rundir.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        self._path = rundir.metrics
        with writing(self._path):
            self._file = self._path.open("a")
        with writing(rundir.tensorboard):
            self._tensorboard = SummaryWriter(str(rundir.tensorboard), purge_step=from_step + 1)

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """Log one record: start, train, eval, input, hint or skipped. It holds at least step. Raises: RunFolderError.

        In the file it gets its time, in seconds since 1970.
        """
        with writing(self._path):
            self._file.write(json.dumps({"kind": kind, "time": time.time(), **record}) + "\n")
            # a record is whole in the file before the next one, whatever then ends the process
            self._file.flush()
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._tensorboard.add_scalar(f"{kind}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush both. Raises: RunFolderError."""
        with writing(self._path):
            self._file.close()
        self._tensorboard.close()


def _stays(record: dict[str, Any], *, from_step: int) -> bool:
    is_written_again = record["kind"] in ("start", "input") and record["step"] == from_step
    # from step 0 on nothing stays: a run that starts anew takes no record over
    return 0 < from_step >= record["step"] and not is_written_again


def plot_run(records: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw training and evaluation loss, and top-1 and top-5, over epochs, as a PNG."""
    from matplotlib.figure import Figure

    train = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for rows, style, label in ((train, "-", "training"), (evals, "o-", "evaluation")):
        loss_axes.plot([r["epoch"] for r in rows], [r["loss"] for r in rows], style, label=label)
    loss_axes.set(xlabel="epoch", ylabel="cross-entropy (nats)", title="Loss")
    for key, label in (("top1", "top-1"), ("top5", "top-5")):
        accuracy_axes.plot([r["epoch"] for r in evals], [100 * r[key] for r in evals], "o-", label=label)
    accuracy_axes.set(xlabel="epoch", ylabel="correct (%)", title="Accuracy, evaluation", ylim=(0, 101))
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right" if axes is loss_axes else "lower right")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
