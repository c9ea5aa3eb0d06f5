"""All-reduce algorithms by name: short functions over a backend and its groups."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bigbatch.comm.algorithms.auto import AUTO
from bigbatch.comm.algorithms.doubling import doubling_allreduce_
from bigbatch.comm.algorithms.hierarchical import hierarchical_allreduce_, sharded_allreduce_
from bigbatch.comm.algorithms.hybrid import HybridTable
from bigbatch.comm.algorithms.ring import Announce, ring_allreduce_, ring_order
from bigbatch.comm.algorithms.shared import Across, ShardAssignment, shared_allreduce_
from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import HALF, Backend, Group
from bigbatch.comm.backends.node_memory import NodeMemory
from bigbatch.comm.rendezvous.topology import Topology

AllReduce = Callable[[Tensor], None]
"""Sums a flat tensor over all ranks, in place. Collective; identical bits on all ranks."""

ALGORITHMS = ("native", "ring", "hierarchical", "sharded", "doubling", "hybrid")


def make_allreduce(
    name: str,
    *,
    backend: Backend,
    topology: Topology,
    memory: NodeMemory | None = None,
    wire: Wire = Wire(),  # noqa: B008
    table: HybridTable | None = None,
) -> AllReduce:
    """Return the named all-reduce over the whole job, with the groups it needs. Collective.

    native: the backend's own. ring: over all ranks. hierarchical: a ring over one leader per node (Jia et al. 2018).
    sharded: each rank of a node sums its own shard across nodes (2D torus). Over NCCL both use NCCL's all-reduce in
    place of the ring. doubling: as hierarchical, but the leaders sum by recursive doubling, for short tensors.
    hybrid: table chooses by the size of the tensor.
    With memory (host tensors), hierarchical and sharded sum inside nodes by shared memory; else by the backend's
    collectives.
    Raises: ValueError for an unknown name, or hybrid without a table.
    """
    if name == "native":
        return partial(_native, backend=backend, wire=wire, staging=Staging())
    if name == "ring":
        across = _make_across(ring_allreduce_, topology.ring, backend=backend, wire=wire)
        return lambda buffer_N: across(buffer_N, (), lambda part: None)
    if name == "doubling":
        node = backend.new_group(topology.groups)
        across = _make_across(doubling_allreduce_, topology.leaders, backend=backend, wire=wire)
        return lambda buffer_N: hierarchical_allreduce_(buffer_N, backend, node=node, across=across, wire=wire)
    if name in ("hierarchical", "sharded"):
        return _make_hierarchical(name, backend=backend, topology=topology, memory=memory, wire=wire)
    if name == "hybrid":
        if table is None:
            raise ValueError("algorithm 'hybrid' chooses by a table of this cluster: make one with bigbatch comm tune")
        made = {
            each: make_allreduce(each, backend=backend, topology=topology, memory=memory, wire=wire)
            for each in sorted(set(table.algorithms))
        }
        return lambda buffer_N: made[table.choose(buffer_N.nbytes)](buffer_N)
    raise ValueError(f"all-reduce algorithm {name!r} is unknown; choose one of {', '.join((AUTO, *ALGORITHMS))}")


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


def _native(buffer_N: Tensor, *, backend: Backend, wire: Wire, staging: Staging, group: Group | None = None) -> None:
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


def _make_across(all_reduce_: Callable[..., None], ranks: Sequence[int], *, backend: Backend, wire: Wire) -> Across:
    staging = Staging()

    def across(own_N: Tensor, others: Sequence[Tensor], announce: Announce) -> None:
        all_reduce_(own_N, backend, ranks, wire=wire, staging=staging, others=others, announce=announce)

    return across


def _make_hierarchical(
    name: str, *, backend: Backend, topology: Topology, memory: NodeMemory | None, wire: Wire
) -> AllReduce:
    count = 1 if name == "hierarchical" else topology.smallest_node
    place = topology.node.index(topology.rank)
    columns = [tuple(group[k] for group in topology.groups) for k in range(count)]
    if name in summed_by_library(backend):
        sum_ = partial(_native, backend=backend, wire=wire, staging=Staging(), group=backend.new_group(columns))
        across: Across = lambda own_N, others, announce: sum_(own_N)  # noqa: E731
    else:
        ranks = columns[place] if place < count else (topology.rank,)
        across = _make_across(ring_allreduce_, ranks, backend=backend, wire=wire)
    if memory is not None:
        owners = ShardAssignment(count, across, ring_order(topology.num_nodes, topology.node_rank))
        here = topology.node
        return lambda buffer_N: shared_allreduce_(buffer_N, backend=backend, memory=memory, node=here, owners=owners)
    node = backend.new_group(topology.groups)
    if count == 1:
        return lambda buffer_N: hierarchical_allreduce_(buffer_N, backend, node=node, across=across, wire=wire)
    return lambda buffer_N: sharded_allreduce_(buffer_N, backend, node=node, num_shards=count, across=across, wire=wire)
