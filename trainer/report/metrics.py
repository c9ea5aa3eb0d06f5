"""Outputs for a run's numbers: metrics.jsonl and loggers."""

import time
from typing import Any, BinaryIO

from bigbatch.files import as_json, open_to_append
from bigbatch.trainer.folder.folder import RunDir, read_records, writing
from bigbatch.trainer.report.cost import ELAPSED
from bigbatch.trainer.report.loggers import BackgroundLogger, figures_of

WRITTEN_AGAIN = ("start", "input")
"""Kinds of records that each start writes; a later start from the same step replaces them."""


class MetricsLog:
    """Appends records to metrics.jsonl, and passes their numbers to the loggers, between begin() and close().

    One per process: after a rank failure the next run of the process continues with it.
    """

    def __init__(self, rundir: RunDir) -> None:
        self.loggers: list[BackgroundLogger] = []
        self._rundir, self._path = rundir, rundir.metrics
        self._file: BinaryIO | None = None
        self._continues_from = 0
        """Lowest starting step for which the open file has no records to remove."""

    def begin(self, *, from_step: int, evaluates_again: bool = False) -> None:
        """Open the file for a run that starts from this step. Raises: RunFolderError.

        Removes the records after this step, and those that earlier starts from it wrote at once, so that no record
        appears twice. Keeps an open file without such records: the other ranks of a job that heals wait meanwhile.
        """
        self._opened_at = time.monotonic()
        if self._file is not None:
            if from_step >= self._continues_from:
                return
            self._close_file()
        self._continues_from = from_step
        again = (*WRITTEN_AGAIN, "eval") if evaluates_again else WRITTEN_AGAIN
        with self._rundir.replacing(self._path) as file:  # line by line: the file may be larger than memory
            # a run that starts at step 0 keeps no records
            for record in read_records(self._path) if from_step else ():
                is_written_again = record["kind"] in again and record.get("step") == from_step
                if _is_whole(record) and record["step"] <= from_step and not is_written_again:
                    file.write((as_json(record) + "\n").encode())
        with writing(self._path):
            self._file = open_to_append(self._path)

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """Log one record of kind start, train, eval, noise, input, joined, hint or skipped; it must have a step.

        Adds the time of day (seconds since 1970) and the seconds since this start of the run. Durations come from the
        latter, since the time of day may be changed. Does nothing if no run has begun. Raises: RunFolderError.
        """
        if self._file is None:
            return
        stamps = {"time": time.time(), ELAPSED: time.monotonic() - self._opened_at}
        with writing(self._path):
            self._file.write((as_json({"kind": kind, **stamps, **record}) + "\n").encode())
            # flush: the record is complete in the file however the process ends
            self._file.flush()
        self._continues_from = max(self._continues_from, record["step"] + (kind in WRITTEN_AGAIN))
        if figures := figures_of(record):
            for logger in self.loggers:
                logger.write(kind, record["step"], figures)

    def close(self) -> None:
        """Flush the file, and close the loggers. Raises: RunFolderError."""
        self._close_file()
        for logger in self.loggers:
            logger.end()
        while self.loggers:
            self.loggers.pop(0).close()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        with writing(self._path):
            if file:
                file.close()


def _is_whole(record: dict[str, Any]) -> bool:
    """Return whether a record has the fields that a resumed run reads."""
    has_times = isinstance(record.get("step"), int) and isinstance(record.get("time"), int | float)
    return has_times and (record["kind"] != "start" or isinstance(record.get("job"), dict))
