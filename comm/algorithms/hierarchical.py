"""All-reduces over node leaders or shards, made of collectives; and recursive doubling, for short tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bigbatch.comm.algorithms.ring import Announce, require_flat
from bigbatch.comm.algorithms.shared import Across
from bigbatch.comm.algorithms.wire import Staging, Wire
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


def doubling_allreduce_(
    own_N: Tensor,
    backend: Backend,
    ranks: Sequence[int],
    *,
    wire: Wire,
    staging: Staging,
    others: Sequence[Tensor] = (),
    announce: Announce = lambda part: None,
) -> None:
    """Sum own_N over ranks, in place, by recursive doubling: the distance to the partner doubles at each hop.

    Collective over ranks. log2(n) hops of nbytes each. If n is not a power of two, the ranks beyond the largest power
    send their values to a partner first and receive the sum last. Both partners add the same two values, and a + b
    rounds as b + a, so all ranks end with identical bits. With sums in fp32, partial sums travel in fp32, too: for
    tensors this short the number of bytes does not matter.
    Raises: ValueError if own_N is not flat and contiguous.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    require_flat(own_N)
    if wire.sums_in_fp32(own_N):
        sum_N = own_N if own_N.dtype == torch.float32 else own_N.float()
        doubling_allreduce_(sum_N, backend, ranks, wire=Wire(), staging=staging, others=others)
        own_N.copy_(sum_N)
        wire.round_(own_N)
        announce(0)
        return
    dtype, place = wire.of(own_N), list(ranks).index(backend.rank)
    packed_N = own_N if dtype == own_N.dtype else staging.take("packed", own_N.numel(), own_N, dtype)
    incoming_N = staging.take("incoming", own_N.numel(), own_N, dtype)
    # the largest power of two that is not above the number of ranks
    even = 1 << (len(ranks).bit_length() - 1)
    wire.divide_(own_N)
    wire.add_(own_N, others, scaled=True)
    extra = place + even
    if place >= even:
        backend.start_send(wire.pack(own_N, packed_N), to=ranks[place - even]).wait()
        # straight into packed_N: the sum is then ready to be unpacked
        backend.start_receive(packed_N, source=ranks[place - even]).wait()
    else:
        if extra < len(ranks):
            backend.start_receive(incoming_N, source=ranks[extra]).wait()
            wire.add_(own_N, [incoming_N])
        distance = 1
        while distance < even:
            # flip one bit of the place: then each is the other's partner
            partner = ranks[place ^ distance]
            outgoing_N = wire.pack(own_N, packed_N)
            backend.start_exchange(send=outgoing_N, to=partner, receive=incoming_N, source=partner).wait()
            # continue with what the partner gets, rounding included: both then add the same two values
            own_N.copy_(outgoing_N)
            wire.add_(own_N, [incoming_N])
            distance *= 2
        wire.pack(own_N, packed_N)
        if extra < len(ranks):
            backend.start_send(packed_N, to=ranks[extra]).wait()
    wire.unpack_(own_N, packed_N)
    announce(0)
