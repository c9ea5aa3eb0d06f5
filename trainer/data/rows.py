"""Work on the rows of a batch in threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

PARTS_PER_THREAD = 4


def for_each_row(fill: Callable[[int], None], num_rows: int, *, threads: ThreadPoolExecutor, num_threads: int) -> None:
    """Call fill with every row; raises what it raised.

    In a few tasks: one for each row costs more than the Python of a resize. In more than there are threads, as
    pictures differ in size.
    """
    stride = min(num_rows, PARTS_PER_THREAD * num_threads)

    def fill_part(first: int) -> None:
        for row in range(first, num_rows, stride):
            fill(row)

    for _ in threads.map(fill_part, range(stride)):
        pass
