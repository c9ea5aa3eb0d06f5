"""Choose the all-reduce algorithm of a job whose config names none."""

from typing import NamedTuple, Protocol

from bigbatch.comm.backends.base import Backend

AUTO = "auto"


class SizeTable(Protocol):
    """Table of the algorithm for each size; see HybridTable."""

    @property
    def algorithms(self) -> tuple[str, ...]: ...

    def choose(self, num_bytes: int) -> str: ...


class Choice(NamedTuple):
    """Name of an algorithm, and the reason for the choice, to print."""

    algorithm: str
    why: str


def choose_algorithm(backend: Backend, *, table: SizeTable | None, table_from: str = "a table") -> Choice:
    """Choose by the table measured on this cluster; without a table, by measurements of other clusters. Pure.

    A table that names one algorithm for all sizes returns that one. table_from: origin of the table.
    """
    if table is not None:
        return Choice("hybrid" if len(table.algorithms) > 1 else table.algorithms[0], f"{table_from}: {table}")
    if backend.world_size == 1:
        return Choice("native", "one rank sums nothing")
    if not backend.capabilities.has_messages:
        return Choice("native", f"{backend.name} sends no messages between two ranks")
    if backend.name == "nccl":
        # NCCL uses all GPUs and network cards of a node at once, in one kernel; bigbatch's hierarchical ring uses one
        # card per node, and Python enqueues each of its messages
        return Choice("native", "NCCL's own uses every link of a node")
    # docs/decisions/051-auto-uses-nccl-on-gpus.md: over tcp it was the fastest or nearly so from 1 MB on, the size of
    # gradients' buffers. The size below which doubling is faster depends on the links, so only a table chooses doubling
    return Choice("hierarchical", "each byte crosses between nodes once per node, not once per rank")
