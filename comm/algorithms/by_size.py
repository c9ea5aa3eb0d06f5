"""The algorithm hybrid: a table chooses the all-reduce of each tensor by its size."""

from typing import Any

from bigbatch.comm.algorithms.by_name import AllReduce, SizeTable, make_allreduce


def make_by_size(*, table: SizeTable | None, **options: Any) -> AllReduce:
    """Return the all-reduce that chooses by this table; options: those of make_allreduce(). Collective.

    Raises: ValueError without a table.
    """
    if table is None:
        raise ValueError("algorithm 'hybrid' chooses by a table of this cluster: make one with bigbatch comm tune")
    made = {name: make_allreduce(name, **options) for name in sorted(set(table.algorithms))}
    return lambda buffer_N: made[table.choose(buffer_N.nbytes)](buffer_N)
