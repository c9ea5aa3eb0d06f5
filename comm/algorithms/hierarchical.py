"""The two hierarchical all-reduces: few steps, and less traffic between nodes than a flat ring."""

from torch import Tensor

from bigbatch.comm.algorithms.ring import ring_allreduce_
from bigbatch.comm.backends.base import Backend, Group


def hierarchical_allreduce_(buffer_N: Tensor, backend: Backend, *, node: Group, leaders: tuple[int, ...]) -> None:
    """Sum buffer_N over all ranks, in place: reduce to each node's leader, ring of leaders, broadcast.

    Collective. Between nodes each leader sends 2 * nbytes * (m - 1) / m for m nodes. For p ranks in nodes of
    k this takes 4(k - 1) + 2(p / k - 1) steps of a ring's kind instead of 2(p - 1).
    Source: Jia et al. 2018, section on hierarchical all-reduce.
    """
    backend.reduce_(buffer_N, node)
    if backend.rank == node.ranks[0]:
        ring_allreduce_(buffer_N, backend, leaders)
    backend.broadcast_(buffer_N, node)


def sharded_allreduce_(buffer_N: Tensor, backend: Backend, *, node: Group, column: Group) -> None:
    """Sum buffer_N over all ranks, in place: reduce-scatter inside a node, all-reduce across, all-gather inside.

    Collective; needs node groups of equal size. Every rank takes part between nodes with 1 / k of the buffer,
    the 2D-torus form (Mikami et al. 2018). What k does not divide (fewer than k elements) goes by the
    backend's own all-reduce.
    """
    k = len(node.ranks)
    even = buffer_N.numel() // k * k
    if even:
        body_N = buffer_N[:even]
        shard_M = body_N.new_empty(even // k)
        backend.reduce_scatter(shard_M, body_N, node)
        if len(column.ranks) > 1:
            backend.all_reduce_(shard_M, column)
        backend.all_gather(body_N, shard_M, node)
    if even < buffer_N.numel():
        backend.all_reduce_(buffer_N[even:], backend.world)
