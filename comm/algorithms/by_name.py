"""All-reduce algorithms by name, short functions over a backend and its groups; the choice of one by auto."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import HALF, Backend, Group
from bigbatch.comm.rendezvous.topology import Topology
from bigbatch.parts import load

if TYPE_CHECKING:
    from bigbatch.comm.backends.node_memory import NodeMemory

AUTO = "auto"


@runtime_checkable
class SizeTable(Protocol):
    """Table of the algorithm for each size; see HybridTable."""

    @property
    def algorithms(self) -> tuple[str, ...]: ...

    def choose(self, num_bytes: int) -> str: ...

    def as_rows(self) -> list[list[Any]]: ...


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


AllReduce = Callable[[Tensor], None]
"""Sums a flat tensor over all ranks, in place. Collective; identical bits on all ranks."""

ALGORITHMS = {
    "native": "bigbatch.comm.algorithms.by_name.make_native",
    "ring": "bigbatch.comm.algorithms.ring.make_ring",
    "hierarchical": "bigbatch.comm.algorithms.hierarchical.make_hierarchical",
    "sharded": "bigbatch.comm.algorithms.hierarchical.make_sharded",
    "doubling": "bigbatch.comm.algorithms.doubling.make_doubling",
    "hybrid": "bigbatch.comm.algorithms.by_size.make_by_size",
}
"""Name -> import path of the function that makes it, from the options of make_allreduce()."""


def make_allreduce(
    name: str,
    *,
    backend: Backend,
    topology: Topology,
    memory: "NodeMemory | None" = None,
    wire: Wire = Wire(),  # noqa: B008
    table: SizeTable | None = None,
) -> AllReduce:
    """Return the named all-reduce over the whole job, with the groups it needs. Collective.

    native: the backend's own. ring: over all ranks. hierarchical: a ring over one leader per node (Jia et al. 2018).
    sharded: each rank of a node sums its own shard across nodes (2D torus). Over NCCL both use NCCL's all-reduce in
    place of the ring. doubling: as hierarchical, but the leaders sum by recursive doubling, for short tensors.
    hybrid: table chooses by the size of the tensor.
    With memory (host tensors), hierarchical and sharded sum inside nodes by shared memory; else by the backend's
    collectives. Raises: ValueError for an unknown name, or hybrid without a table.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"all-reduce algorithm {name!r} is unknown; choose one of {', '.join((AUTO, *ALGORITHMS))}")
    made: AllReduce = load(ALGORITHMS[name])(backend=backend, topology=topology, memory=memory, wire=wire, table=table)
    return made


def make_native(*, backend: Backend, wire: Wire, **_: object) -> AllReduce:
    """Return the backend's own all-reduce over all ranks. Not collective."""
    if wire.dtype is None and not wire.widens(backend):  # every tensor travels and is summed as it is
        return lambda buffer_N: backend.all_reduce_(buffer_N, backend.world)
    return partial(native_allreduce_, backend=backend, wire=wire, staging=Staging())


def travelling_dtype(algorithm: str, tensor_N: Tensor, *, wire: Wire, backend: Backend) -> torch.dtype:
    """Return the dtype in which a tensor travels: fp32 if the algorithm would round each addition and must not."""
    if algorithm in summed_by_library(backend):
        widens = wire.widens(backend)
    else:
        widens = algorithm == "doubling" and wire.in_fp32
    dtype = wire.of(tensor_N)
    return torch.float32 if widens and dtype in HALF else dtype


def summed_by_library(backend: Backend) -> frozenset[str]:
    """Return the algorithms that sum across nodes by the backend's own all-reduce.

    NCCL's all-reduce uses every link of a node and starts no message from Python, so it replaces the ring.
    """
    return frozenset({"native", "hierarchical", "sharded"} if backend.name == "nccl" else {"native"})


def native_allreduce_(
    buffer_N: Tensor, *, backend: Backend, wire: Wire, staging: Staging, group: Group | None = None
) -> None:
    """Sum by the backend's own all-reduce, in the precision of the wire; the backend chooses how it sums.

    group: the ranks that take part, if not the whole world.

    If sums must be in fp32 and the backend would round each addition, it gets fp32; a narrow wire then saves nothing.
    """
    dtype, group = wire.of(buffer_N), group or backend.world
    if dtype == buffer_N.dtype or wire.widens(backend):
        with wire.widened(buffer_N, backend) as sum_N:
            backend.all_reduce_(sum_N, group)
        wire.round_(buffer_N)
        return
    packed_N = staging.take("packed", buffer_N.numel(), buffer_N, dtype)
    wire.divide_(buffer_N)
    backend.all_reduce_(wire.pack(buffer_N, packed_N), group)
    wire.unpack_(buffer_N, packed_N)
