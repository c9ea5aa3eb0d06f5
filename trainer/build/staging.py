"""Copy packed data to every node before a run, while the ranks exchange progress."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigbatch.awake import awake_seconds
from bigbatch.comm.communicator import Communicator
from bigbatch.errors import DataError, print_line
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.datasets.stage import stage, using_copy

BEAT_SECONDS = 1.0
"""Seconds between two exchanges: a node that copies for minutes must not look dead to the others."""
LINE_SECONDS = 10.0
"""Seconds between two lines of progress."""
NUM_WORKERS = 4
State = dict[str, Any]
"""State of a rank: its failure; seconds and summary of a finished copy; or share and progress of an unfinished one."""


def stage_data(config: Config, communicator: Communicator) -> tuple[Config, str | None]:
    """Return the config with data.root at the copy, and a line for the log; unchanged without data.stage. Collective.

    The first rank of a node copies, the others wait for it. Raises: DataError, on all ranks alike, as soon as one
    node fails, or gets no byte for comm.timeout_seconds.
    """
    if config.data.stage is None:
        return config, None
    state: Callable[[], State] = _nothing_to_copy
    if communicator.env.local_rank == 0:
        state = _Copy(
            Path(config.data.root),
            Path(config.data.stage),
            host=communicator.env.host,
            timeout_seconds=config.comm.timeout_seconds,
        ).state
    slowest = max(_wait_for_all(state, communicator), key=lambda copy: copy["seconds"])
    staged = replace(config, data=replace(config.data, root=config.data.stage))
    return staged, f"data staged in {config.data.stage}: {slowest['summary']}"


@contextmanager
def using_staged(config: Config) -> Iterator[None]:
    """Register each rank as a user of its node's copy; with data.keep_staged false, the last user removes it."""
    if config.data.stage is None:
        yield
        return
    with using_copy(Path(config.data.stage), keep=config.data.keep_staged):
        yield


def _nothing_to_copy() -> State:
    return {"seconds": 0.0, "summary": ""}


def _wait_for_all(state: Callable[[], State], communicator: Communicator) -> list[State]:
    """Return the last state of each rank; rank 0 prints the progress of the slowest node. Collective."""
    printed_at = awake_seconds()
    while True:
        states = communicator.gather(state())
        # every rank sees the same states, so all raise the same error
        if failures := [each["failure"] for each in states if "failure" in each]:
            raise DataError(failures[0])
        under_way = [each for each in states if "share" in each]
        if not under_way:
            return states
        if communicator.rank == 0 and awake_seconds() - printed_at >= LINE_SECONDS:
            printed_at = awake_seconds()
            last = min(under_way, key=lambda each: float(each["share"]))
            print_line(f"staging: {last['progress']}", file=sys.stderr)


class _Copy:
    def __init__(self, source: Path, target: Path, *, host: str, timeout_seconds: float) -> None:
        self._source, self._target, self._host, self._timeout_seconds = source, target, host, timeout_seconds
        self._done_bytes = self._total_bytes = 0
        self._waits = False
        self._seen: tuple[int, int] | None = None
        self._seen_at = awake_seconds()
        thread = ThreadPoolExecutor(1, thread_name_prefix="bigbatch-stage")
        self._copy = thread.submit(
            stage, source, target, num_workers=NUM_WORKERS, on_progress=self._progress, on_wait=self._wait
        )
        thread.shutdown(wait=False)  # if another rank is lost, this one exits at once, with its copy unfinished

    def _progress(self, done_bytes: int, total_bytes: int) -> None:
        self._done_bytes, self._total_bytes, self._waits = done_bytes, total_bytes, False

    def _wait(self) -> None:
        self._waits = True

    def state(self) -> State:
        """Return the result of the copy, or after BEAT_SECONDS its progress. Raises: the copy's, except DataError."""
        # this also sets the period of exchanges: ranks with nothing to copy wait for this one in the gather
        wait([self._copy], timeout=BEAT_SECONDS)
        if not self._copy.done():
            # files grow before they count as done, and a copy by another process shows in the folder only
            seen = self._done_bytes, bytes_in(self._target)
            if seen != self._seen:
                self._seen, self._seen_at = seen, awake_seconds()
            if awake_seconds() - self._seen_at > self._timeout_seconds:
                failure = (
                    f"{self._target}: no byte came from {self._source} for comm.timeout_seconds="
                    f"{self._timeout_seconds:g} on {self._host}; see what holds it up and start again: what is copied "
                    "is kept"
                )
                return {"failure": failure}
            progress = f"{self._done_bytes / 1e9:.4g} of {self._total_bytes / 1e9:.4g} GB on {self._host}"
            if self._waits:
                progress = f"waiting for another process, which stages into {self._target} on {self._host}"
            return {"share": self._done_bytes / max(self._total_bytes, 1), "progress": progress}
        error = self._copy.exception()
        if error is None:
            return {"seconds": self._copy.result().seconds, "summary": str(self._copy.result())}
        if not isinstance(error, DataError):
            raise error
        return {"failure": str(error)}


def bytes_in(folder: Path) -> int:
    """Return the bytes of all staged files in folder, finished or not."""
    total = 0
    for path in folder.glob("*/*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed or deleted since
            continue
    return total
