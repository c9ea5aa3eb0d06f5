"""The run folder: one place for everything that a run leaves behind. Imports no torch."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.errors import RunFolderError
from bigbatch.files import write_whole
from bigbatch.trainer.config.file import RUN_CONFIG, load_config
from bigbatch.trainer.config.schema import Config


@dataclass(frozen=True)
class RunDir:
    """Names the paths in a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """Return where the resolved config lies; `bigbatch train --config` takes it as it is."""
        return self.path / RUN_CONFIG

    @property
    def metrics(self) -> Path:
        """Return where the records lie, a JSON object a line: a start, a report, an evaluation and so on, and when."""
        return self.path / "metrics.jsonl"

    @property
    def calibration(self) -> Path:
        """Return where the calibration lies by which comm.algorithm=auto chose, if it did: the run goes on with it."""
        return self.path / "calibration.json"

    @property
    def tensorboard(self) -> Path:
        """Return the folder of event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Return the folder of checkpoint folders."""
        return self.path / "checkpoints"

    @property
    def plot(self) -> Path:
        """Return where loss and accuracy over epochs are plotted."""
        return self.path / "plot.png"

    @property
    def timeline(self) -> Path:
        """Return where comm.timeline_steps put what each buffer did beside backward, for ui.perfetto.dev."""
        return self.path / "timeline.json"

    @property
    def summary(self) -> Path:
        """Return where the outcome lies; written once, at the end of a finished run."""
        return self.path / "summary.json"

    @property
    def mlperf_log(self) -> Path:
        """Return where the run lies in MLPerf's log format, if `bigbatch verify` looked at it."""
        return self.path / "mlperf_log.txt"

    def write_text(self, path: Path, text: str) -> None:
        """Replace a file of the folder in one step. Raises: RunFolderError."""
        with writing(path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Guard code that writes path. Raises: RunFolderError where the system refuses, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}; free some disk, or name another folder where this one was named; "
            "a run goes on from its newest checkpoint"
        ) from error


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole records of a metrics file; a last line cut short by a crash is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def load_run_config(rundir: RunDir, overrides: Sequence[str], *, prog: str) -> Config:
    """Load the config of a run folder, with overrides. Raises: RunFolderError where it is none; as load_config."""
    if not rundir.config.is_file():
        raise RunFolderError(f"{rundir.path} is no run folder: it holds no {rundir.config.name}")
    return load_config(["--config", str(rundir.config), *overrides], prog=prog)
