"""The run folder: one place for everything that a run leaves behind. Imports no torch."""

import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from bigbatch.errors import RunFolderError, first_line, why_unwritten
from bigbatch.files import make_folder, open_plain, parse_json, read_plain, replacing
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.trust import RUN_CONFIG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_REPORTS = 20_000
"""In a plot: more than a curve has points to show them by."""


class RunDir:
    """Names the paths in a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / RUN_CONFIG
        """The resolved config; `bigbatch train --config` takes it as it is."""
        self.metrics = path / "metrics.jsonl"
        """Records, a JSON object a line: a start, a report, an evaluation and so on, and when."""
        self.calibration = path / "calibration.json"
        """Table by which comm.algorithm=auto chose, if it did: the run goes on with it."""
        self.mode = path / "mode.json"
        """Record by which compute.mode=auto chose, if it did: a resumed run goes on in that mode."""
        self.tensorboard = path / "tensorboard"
        self.wandb_id = path / "wandb_id.txt"
        """Name of the run at Weights & Biases."""
        self.checkpoints = path / "checkpoints"
        self.values = path / "values"
        """What run.digest_values records, a folder for each rank."""
        self.memory_name = self.checkpoints / ".memory"
        """Name of the copies of the run's state in its nodes' memory."""
        self.plot = path / "plot.png"
        self.timeline = path / "timeline.json"
        """What each buffer did beside backward in comm.timeline_steps, for ui.perfetto.dev."""
        self.summary = path / "summary.json"
        """The outcome; written once, at the end of a finished run."""
        self.mlperf_log = path / "mlperf_log.txt"
        """The run in MLPerf's log format, if `bigbatch verify` looked at it."""

    def make_folder(self, path: Path) -> None:
        """Make a folder in the folder. Raises: RunFolderError, also if a link is in its place."""
        with writing(path):
            make_folder(path, within=self.path)

    @contextmanager
    def replacing(self, path: Path) -> Iterator[BinaryIO]:
        """Yield a new file that replaces one of the folder when the block ends well. Raises: RunFolderError."""
        with writing(path):
            make_folder(path.parent, within=self.path)
            with replacing(path) as file:
                yield file

    def write_text(self, path: Path, text: str) -> None:
        """Replace a file of the folder in one step. Raises: RunFolderError."""
        with self.replacing(path) as file:
            file.write(text.encode(errors="backslashreplace"))  # a name of others may hold bytes that are no text

    def save_plot(self, path: Path, figure: "Figure") -> None:
        """Replace a PNG of the folder in one step. Raises: RunFolderError."""
        with self.replacing(path) as file:
            figure.savefig(file, format="png", dpi=120)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Guard code that writes path. Raises: RunFolderError where the system refuses, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {why_unwritten(path, error)}; put that right, or name another folder where this "
            "one was named; a run goes on from its newest checkpoint"
        ) from error


def require_writable(folder: Path) -> None:
    """Make a folder for what is to be written at the end, before anything takes long. Raises: RunFolderError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file, one by one; each has a kind, which is a word.

    Lines that are none, such as a last one that a crash has cut short, are left out. Raises: RunFolderError.
    """
    if not path.exists():
        return
    try:
        with io.TextIOWrapper(open_plain(path), errors="replace") as file:
            for line in file:
                try:
                    record = parse_json(line)
                except ValueError:
                    continue
                # a word alone may become a file's name
                if isinstance(record, dict) and isinstance(kind := record.get("kind"), str) and kind.isidentifier():
                    yield record
    except OSError as error:
        raise RunFolderError(f"{path} is not readable: {error.strerror or error}") from error


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file for a plot: of its reports MOST_REPORTS at most, evenly spread; no digests.

    Reports come first. A file of any length takes the memory of that many.
    """
    reports: list[dict[str, Any]] = []
    stride = 1
    for number, record in enumerate(record for record in read_records(path) if record["kind"] == "train"):
        if number % stride == 0:
            reports.append(record)
            if len(reports) > MOST_REPORTS:
                reports, stride = reports[::2], 2 * stride
    return reports + [record for record in read_records(path) if record["kind"] not in ("train", "digests")]


def read_summary(rundir: RunDir) -> dict[str, Any]:
    """Read what a finished run came to. Raises: RunFolderError."""
    try:
        return dict(parse_json(read_plain(rundir.summary)))
    except (OSError, ValueError, TypeError) as error:
        raise RunFolderError(
            f"{rundir.summary} is not readable ({first_line(error)}): remove it, and the same command writes it anew"
        ) from error


def load_run_config(rundir: RunDir, overrides: Sequence[str], *, prog: str) -> Config:
    """Load the config of a run folder, with overrides. Raises: RunFolderError where it is none; as load_config."""
    if not rundir.config.is_file():
        raise RunFolderError(f"{rundir.path} is no run folder: it holds no {rundir.config.name}")
    return load_config(["--config", str(rundir.config), *overrides], prog=prog, is_run=True)
