"""Copy packed data to every node before a run."""

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.awake import awake_seconds
from bigbatch.comm.connection import Connection
from bigbatch.errors import ConfigError, DataError, print_line
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.datasets.stage import stage, using_copy

BEAT_SECONDS = 1.0
"""Seconds between two exchanges: a node that copies for minutes must not look dead to the others."""
LINE_SECONDS = 10.0
"""Seconds between two lines of progress."""
NUM_WORKERS = 4
State = dict[str, Any]
"""State of a rank: its failure; seconds and summary of a finished copy; or progress of an unfinished one."""


def stage_data(config: Config, connection: Connection) -> tuple[Config, str]:
    """Return the config with data.root at the copy in data.stage, and a line for the log. Collective.

    The first rank of a node copies, the others wait for it. Raises: DataError, on all ranks alike, as soon as one
    node fails, or gets no byte for comm.timeout_seconds.
    """
    assert config.data.stage is not None
    is_first = connection.env.local_rank == 0
    state = _start_copy(config, connection.env.host) if is_first else lambda: {"seconds": 0.0, "summary": ""}
    print_at = awake_seconds() + LINE_SECONDS
    while True:
        states = connection.gather(state())
        # every rank sees the same states, so all raise the same error
        if failures := [each["failure"] for each in states if "failure" in each]:
            raise DataError(failures[0])
        under_way = [each["progress"] for each in states if "progress" in each]
        if not under_way:
            slowest = max(states, key=lambda each: float(each["seconds"]))
            staged = replace(config, data=replace(config.data, root=config.data.stage))
            return staged, f"data staged in {config.data.stage}: {slowest['summary']}"
        if connection.rank == 0 and awake_seconds() >= print_at:
            print_at = awake_seconds() + LINE_SECONDS
            print_line(f"staging: {under_way[0]}", file=sys.stderr)


def using_staged(config: Config) -> AbstractContextManager[None]:
    """Register each rank as a user of its node's copy; with data.keep_staged false, the last user removes it."""
    return using_copy(Path(str(config.data.stage)), keep=config.data.keep_staged)


def _start_copy(config: Config, host: str) -> Callable[[], State]:
    """Start the copy on a thread; return a function that waits up to BEAT_SECONDS for its end and returns its state.

    That function raises the copy's error, except those for the user.
    """
    source, target, limit = Path(config.data.root), Path(str(config.data.stage)), config.comm.timeout_seconds
    progress, moved_at = f"starting on {host}", awake_seconds()

    def advance(done_bytes: int, total_bytes: int) -> None:
        nonlocal progress, moved_at
        progress, moved_at = f"{done_bytes / 1e9:.4g} of {total_bytes / 1e9:.4g} GB on {host}", awake_seconds()

    def wait_for_another() -> None:
        nonlocal progress, moved_at
        # the process that copies watches its own progress
        progress, moved_at = f"waiting for another process, which stages into {target} on {host}", math.inf

    def state() -> State:
        # this also sets the period of exchanges: ranks with nothing to copy wait for this one in the gather
        wait([copy], timeout=BEAT_SECONDS)
        if not copy.done():
            if awake_seconds() - moved_at <= limit:
                return {"progress": progress}
            stalled = f"no byte came from {source} for comm.timeout_seconds={limit:g} on {host}"
            advice = "see what holds it up and start again: what is copied is kept"
            return {"failure": f"{target}: {stalled}; {advice}"}
        error = copy.exception()
        if error is None:
            return {"seconds": copy.result().seconds, "summary": str(copy.result())}
        if isinstance(error, (ConfigError, DataError)):
            return {"failure": str(error)}
        raise error

    thread = ThreadPoolExecutor(1, thread_name_prefix="bigbatch-stage")
    copying = partial(stage, shared_by=config.data.shared_by, num_workers=NUM_WORKERS)
    copy = thread.submit(copying, source, target, on_progress=advance, on_wait=wait_for_another)
    thread.shutdown(wait=False)  # if another rank is lost, this one exits at once, with its copy unfinished
    return state
