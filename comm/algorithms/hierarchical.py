"""Hierarchical all-reduces made of a transport's own collectives: for GPUs, which do not share host memory."""

from torch import Tensor

from bigbatch.comm.algorithms.shared import Across
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import Backend, Group


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
