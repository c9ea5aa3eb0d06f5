"""The run folder and its files. Does not import torch."""

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from bigbatch.errors import RunFolderError, first_line, write_failure
from bigbatch.files import as_json, make_folder, parse_json, read_lines, read_plain, replacing
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.trust import RUN_CONFIG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = TypeVar("Record")
MAX_REPORTS = 20_000
"""Limit of reports in a plot: more than a curve can show."""


class RunDir:
    """Paths in a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / RUN_CONFIG
        """The resolved config; `bigbatch train --config` accepts it."""
        self.metrics = path / "metrics.jsonl"
        """Records with times, one JSON object per line: starts, reports, evaluations and others."""
        self.tensorboard = path / "tensorboard"
        self.wandb_id = path / "wandb_id.txt"
        self.mlflow_id = path / "mlflow_id.txt"
        """Files with the run's id in Weights & Biases and in MLflow."""
        self.checkpoints = path / "checkpoints"
        self.values = path / "values"
        """Values of run.digest_values, a folder per rank."""
        self.plot = path / "plot.png"
        self.timeline = path / "timeline.json"
        """Trace of each buffer during backward in comm.timeline_steps, for ui.perfetto.dev."""
        self.summary = path / "summary.json"
        """Results; written once, at the end of a finished run."""
        self.mlperf_log = path / "mlperf_log.txt"
        """The run in MLPerf's log format, written by `bigbatch verify`."""

    def require_config(self) -> Path:
        """Return the path of the config. Raises: RunFolderError if the folder holds none, so that it is of no run."""
        if not self.config.is_file():
            raise RunFolderError(f"{self.path} is not a run folder: it holds no {self.config.name}")
        return self.config

    def make_folder(self, path: Path) -> None:
        """Create a folder in the run folder. Raises: RunFolderError, also if its path is a link."""
        with writing(path):
            make_folder(path, within=self.path)

    @contextmanager
    def replacing(self, path: Path) -> Iterator[BinaryIO]:
        """Yield a new file that replaces the old one if the block succeeds. Raises: RunFolderError."""
        with writing(path):
            make_folder(path.parent, within=self.path)
            with replacing(path) as file:
                yield file

    def write_text(self, path: Path, text: str) -> None:
        """Replace a file atomically. Raises: RunFolderError."""
        with self.replacing(path) as file:
            file.write(text.encode(errors="backslashreplace"))  # foreign names may contain bytes that are not text

    def write_json(self, path: Path, value: Any) -> None:
        """Write a value as an indented JSON file, atomically. Raises: RunFolderError."""
        self.write_text(path, as_json(value, indent=1) + "\n")

    def save_plot(self, path: Path, figure: "Figure") -> None:
        from bigbatch.colours import ignore_missing_glyphs

        ignore_missing_glyphs()
        with self.replacing(path) as file:
            figure.savefig(file, format="png", dpi=120)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context of code that writes path. Raises: RunFolderError for an OSError, for example on a full disk."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {write_failure(path, error)}; correct this, or name another folder"
        ) from error


def require_writable(folder: Path) -> None:
    """Create an output folder before long work starts. Raises: RunFolderError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file; the kind of each is one word.

    Leaves out malformed lines, such as a last line that a crash has cut off. Raises: RunFolderError.
    """
    return (record for _, record in read_records_from(path, start=0))


def read_records_from(path: Path, *, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the byte after each record that begins at byte start or later, and the record, as read_records does."""
    if not path.exists():
        return
    try:
        for line in read_lines(path, start=start):
            start += len(line)
            try:
                record = parse_json(line.decode(errors="replace"))
            except ValueError:
                continue
            # the kind may become a file name
            if isinstance(record, dict) and isinstance(kind := record.get("kind"), str) and kind.isidentifier():
                yield start, record
    except OSError as error:
        raise RunFolderError(f"{path} is not readable: {error.strerror or error}") from error


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file for a plot: at most MAX_REPORTS reports, evenly spread; no digests.

    Reports come first. Memory does not grow with the file's length.
    """
    reports: list[dict[str, Any]] = []
    stride = 1
    for number, record in enumerate(record for record in read_records(path) if record["kind"] == "train"):
        if number % stride == 0:
            reports.append(record)
            if len(reports) > MAX_REPORTS:
                reports, stride = reports[::2], 2 * stride
    return reports + [record for record in read_records(path) if record["kind"] not in ("train", "digests")]


def read_summary(rundir: RunDir) -> dict[str, Any]:
    """Return the summary of a finished run; {} without one. Raises: RunFolderError."""
    return read_recorded(rundir.summary, dict, remedy="the same command writes it again") or {}


def read_recorded(path: Path, parse: Callable[[Any], Record], *, remedy: str) -> Record | None:
    """Return the content of a JSON file as parse makes it; None if there is no file.

    Raises: RunFolderError with the remedy if it is damaged, which parse may show by any error of wrong content.
    """
    if not path.exists():
        return None
    try:
        return parse(parse_json(read_plain(path)))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise RunFolderError(f"{path} is not readable ({first_line(error)}): remove it, and {remedy}") from error


def load_run_config(
    rundir: RunDir, overrides: Sequence[str], *, prog: str, imports: Collection[str] | None = None
) -> Config:
    """Load a run folder's config, with overrides. Raises: RunFolderError if there is none; errors of load_config."""
    words = ["--config", str(rundir.require_config()), *overrides]
    return load_config(words, prog=prog, is_run=True, imports=imports)
