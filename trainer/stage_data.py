"""Copies packed data to every node before a run, while the ranks keep in touch."""

import json
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.config import Config
from bigbatch.trainer.data.stage import Summary, stage
from bigbatch.trainer.errors import DataError

BEAT_SECONDS = 1.0
"""Between two exchanges: a node that copies for minutes must not look dead to one that has finished."""
NUM_WORKERS = 4


def stage_data(config: Config, communicator: Communicator) -> tuple[Config, str | None]:
    """The config with data.root at the copy, and a line for the log; as it was where data.stage is null. Collective.

    One rank of a node copies, the others wait for it. Raises: DataError, on all ranks alike.
    """
    if config.data.stage is None:
        return config, None
    target = Path(config.data.stage)
    thread = ThreadPoolExecutor(1, thread_name_prefix="bigbatch-stage")
    copy = thread.submit(stage, Path(config.data.root), target, num_workers=NUM_WORKERS)
    thread.shutdown(wait=False)  # where another rank is lost, this one leaves at once, its copy unfinished
    while not all(states := communicator.gather_text(_state(copy))):
        wait([copy], timeout=BEAT_SECONDS)
    copies = [json.loads(state) for state in states]
    if failures := [copy["failure"] for copy in copies if "failure" in copy]:
        raise DataError(failures[0])
    slowest = max(copies, key=lambda copy: copy["seconds"])  # of a node's ranks, the one that copied
    staged = replace(config, data=replace(config.data, root=str(target)))
    return staged, f"data staged in {target}: {slowest['summary']}"


def _state(copy: "Future[Summary]") -> str:
    """ "" while it goes on; then what came of it, or what went wrong, as JSON."""
    if not copy.done():
        return ""
    error = copy.exception()
    if error is None:
        return json.dumps({"seconds": copy.result().seconds, "summary": str(copy.result())})
    if not isinstance(error, DataError):
        raise error
    return json.dumps({"failure": str(error)})
