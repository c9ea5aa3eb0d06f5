"""Run work in many processes, which end after a Ctrl-C or if the parent is killed."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from bigbatch.errors import ConfigError, DataError

Task = TypeVar("Task")
Result = TypeVar("Result")
Advance = Callable[[int, int], object]
"""Takes (done, in all)."""


def show_nothing(done: int, total: int) -> None:
    """Ignore the progress."""


MAX_WORKERS = 4096
"""Most processes or threads, as for data.num_threads: more would take all process numbers of this host."""
_works: list[Callable[[Any], Any]] = []
"""The work function of this pool process, sent once: it may hold the names of a million images."""


def require_workers(num_workers: int) -> None:
    """Raise ConfigError for an impossible number of processes or threads."""
    if not 1 <= num_workers <= MAX_WORKERS:
        raise ConfigError(f"num_workers={num_workers} is not possible; give 1 to {MAX_WORKERS}")


def in_parallel(work: Callable[[Task], Result], tasks: Sequence[Task], *, num_workers: int) -> Iterator[Result]:
    """Yield work(task) for each task, in order, computed in num_workers processes (1: in this one).

    Raises: ConfigError for an impossible num_workers, at the call; DataError if a process dies.
    """
    require_workers(num_workers)
    if num_workers == 1 or len(tasks) < 2:
        return map(work, tasks)
    return _in_processes(work, tasks, num_processes=min(num_workers, len(tasks)))


def _in_processes(work: Callable[[Task], Result], tasks: Sequence[Task], *, num_processes: int) -> Iterator[Result]:
    # a fork would copy the state of CUDA, MPI and running threads
    context = get_context("spawn")
    try:
        pool = ProcessPoolExecutor(num_processes, context, initializer=_start_worker, initargs=(work,))
        try:
            yield from pool.map(_work_here, tasks)
        finally:
            # map cancels by itself, except if a Ctrl-C arrives while it still submits tasks
            pool.shutdown(cancel_futures=True)
    except BrokenProcessPool as error:
        hint = "out of memory? give fewer --workers; from a script of your own, guard it by if __name__ == '__main__'"
        raise DataError(f"a worker process died: {hint}") from error


def _start_worker(work: Callable[[Any], Any]) -> None:
    """Prepare a worker process: it ignores Ctrl-C, which the parent handles, and ends if the parent is killed."""
    _works[:] = [work]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _work_here(task: Any) -> Any:
    return _works[0](task)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    # from a thread, sys.exit would end that thread alone
    os._exit(1)
