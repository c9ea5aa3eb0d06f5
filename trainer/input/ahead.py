"""Work ahead of whoever consumes it."""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterable[T], *, depth: int) -> Generator[T, None, None]:
    """Yield items in order while one thread draws up to depth of them in advance.

    Starts at the first draw. An exception of items is raised at its place in the order. Closing waits for
    the item in progress, drops the rest, ends the thread and closes items if it is a generator.
    """
    source, end = iter(items), object()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bigbatch-ahead")
    # one worker runs these calls one after the other, so the order is kept without a queue or a lock
    pending = deque(thread.submit(next, source, end) for _ in range(depth))
    try:
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, source, end))
            yield item  # type: ignore[misc]
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
        if isinstance(source, Generator):
            # after the thread has ended: a generator that runs cannot be closed
            source.close()
