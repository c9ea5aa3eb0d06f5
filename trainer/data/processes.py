"""Work for many processes, such that a Ctrl-C or a killed parent leaves none of them behind."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from bigbatch.trainer.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

_works: list[Callable[[Any], Any]] = []
"""The one work of a process of the pool: sent once, as it may hold the names of a million pictures."""


def in_parallel(work: Callable[[Task], Result], tasks: Sequence[Task], *, num_workers: int) -> Iterator[Result]:
    """work of each task, in order, in num_workers processes (1: in this one). Raises: DataError if one dies."""
    if num_workers == 1 or len(tasks) < 2:
        yield from map(work, tasks)
        return
    # a fork would copy the state of CUDA, MPI and running threads
    context, num_processes = get_context("spawn"), min(num_workers, len(tasks))
    try:
        with ProcessPoolExecutor(num_processes, context, initializer=_start_worker, initargs=(work,)) as pool:
            yield from pool.map(_work_here, tasks)
    except BrokenProcessPool as error:
        hint = "out of memory? give fewer --workers; from a script of your own, guard it by if __name__ == '__main__'"
        raise DataError(f"a worker process died: {hint}") from error


def _start_worker(work: Callable[[Any], Any]) -> None:
    """Leave Ctrl-C to the parent, which lets the tasks at work be finished; end with a parent that was killed."""
    _works[:] = [work]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _work_here(task: Any) -> Any:
    return _works[0](task)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
