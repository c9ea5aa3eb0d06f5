"""Say which ranks a meeting waits for, long before its time limit ends it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread

from bigbatch.awake import wait_awake
from bigbatch.errors import tell

MOST_NAMED = 8
WARN_SECONDS = 20.0
"""After how long a meeting names the ranks that have not come."""


@contextmanager
def telling_late(seconds: float, describe: Callable[[], str]) -> Iterator[None]:
    """Print what describe returns on standard error if this takes longer than seconds, and again after twice, four
    times ... as long. describe runs on another thread; "" prints nothing.
    """
    ended = Event()

    def watch() -> None:
        pause = seconds
        while not wait_awake(ended.wait, pause):  # the time of a suspended job does not count
            with suppress(RuntimeError):  # of a store that has ended, which the wait itself reports
                if line := describe():
                    tell(line)
            pause *= 2

    watcher = Thread(target=watch, name="bigbatch-late", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(timeout=1.0)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return rank 3, or ranks 3, 4, 5; of many ranks the first MOST_NAMED; "" for none."""
    if not ranks:
        return ""
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"
