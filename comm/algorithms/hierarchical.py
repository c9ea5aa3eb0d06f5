"""Hierarchical all-reduces; those of GPUs, which do not share host memory, use the transport's own collectives."""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bigbatch.comm.algorithms.by_name import AllReduce, native_allreduce_, summed_by_library
from bigbatch.comm.algorithms.ring import Across, make_across, ring_allreduce_
from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import Backend, Group
from bigbatch.comm.rendezvous.topology import Topology
from bigbatch.parts import load

if TYPE_CHECKING:
    from bigbatch.comm.backends.node_memory import NodeMemory

IN_SHARED_MEMORY = "bigbatch.comm.algorithms.shared.make_shared"


def make_hierarchical(*, topology: Topology, **options: Any) -> AllReduce:
    """Return the form with one leader per node; options: those of make_allreduce(). Collective."""
    return _make("hierarchical", 1, topology=topology, **options)


def make_sharded(*, topology: Topology, **options: Any) -> AllReduce:
    """Return the form with one shard per rank of the smallest node. Collective."""
    return _make("sharded", topology.smallest_node, topology=topology, **options)


def _make(
    name: str, count: int, *, backend: Backend, topology: Topology, memory: "NodeMemory | None", wire: Wire, **_: object
) -> AllReduce:
    """count: number of shards of each node."""
    place = topology.node.index(topology.rank)
    columns = [tuple(group[k] for group in topology.groups) for k in range(count)]
    if name in summed_by_library(backend):
        group = backend.new_group(columns)
        sum_ = partial(native_allreduce_, backend=backend, wire=wire, staging=Staging(), group=group)
        across: Across = lambda own_N, others, announce: sum_(own_N)  # noqa: E731
    else:
        ranks = columns[place] if place < count else (topology.rank,)
        across = make_across(ring_allreduce_, ranks, backend=backend, wire=wire)
    if memory is not None:
        made: AllReduce = load(IN_SHARED_MEMORY)(count, across, backend=backend, topology=topology, memory=memory)
        return made
    node = backend.new_group(topology.groups)
    if count == 1:
        return lambda buffer_N: hierarchical_allreduce_(buffer_N, backend, node=node, across=across, wire=wire)
    return lambda buffer_N: sharded_allreduce_(buffer_N, backend, node=node, num_shards=count, across=across, wire=wire)


def hierarchical_allreduce_(buffer_N: Tensor, backend: Backend, *, node: Group, across: Across, wire: Wire) -> None:
    """Sum buffer_N over all ranks, in place: reduce to each node's leader, sum over leaders, broadcast.

    Collective. Between m nodes, each leader sends 2 * nbytes * (m - 1) / m if across is a ring. Then p ranks in nodes
    of k take 4(k - 1) + 2(p / k - 1) ring steps instead of 2(p - 1).
    Source: Jia et al. 2018, section on hierarchical all-reduce.
    """
    leader = node.ranks[0]
    with wire.widened(buffer_N, backend) as sum_N:
        backend.reduce_(sum_N, node, root=leader)
    if backend.rank == leader:
        across(buffer_N, (), lambda part: None)
    backend.broadcast_(buffer_N, node, root=leader)


def sharded_allreduce_(
    buffer_N: Tensor, backend: Backend, *, node: Group, num_shards: int, across: Across, wire: Wire
) -> None:
    """Sum buffer_N over all ranks, in place: reduce-scatter inside a node, sum across, all-gather inside.

    Collective. Rank i of each node sums shard i of num_shards with rank i of every other node, as in a 2D torus (Mikami
    et al. 2018). num_shards: size of the smallest node. If a node has more ranks, or the shards are unequal, the node
    reduces and broadcasts them one by one.
    """
    place = node.ranks.index(backend.rank)
    shards = buffer_N.tensor_split(num_shards)
    # the libraries' reduce-scatter takes only equal shards, one for each rank of the group
    if len(node.ranks) == num_shards and buffer_N.numel() % num_shards == 0:
        if not buffer_N.numel():
            return
        # MPI forbids a result that lies within its input
        shard_M = shards[place] if backend.capabilities.in_place else shards[place].clone()
        with wire.widened(shard_M, backend) as sum_M:
            backend.reduce_scatter(sum_M, buffer_N.to(sum_M.dtype), node)
        across(shard_M, (), lambda part: None)
        backend.all_gather(buffer_N, shard_M, node)
        return
    for owner, shard_M in zip(node.ranks, shards, strict=False):
        if shard_M.numel():
            with wire.widened(shard_M, backend) as sum_M:
                backend.reduce_(sum_M, node, root=owner)
    # ranks beyond the smallest node's size have no counterpart in every other node, and own no shard
    if place < num_shards:
        across(shards[place], (), lambda part: None)
    for owner, shard_M in zip(node.ranks, shards, strict=False):
        if shard_M.numel():
            backend.broadcast_(shard_M, node, root=owner)
