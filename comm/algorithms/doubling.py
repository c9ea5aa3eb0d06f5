"""Recursive doubling: the whole tensor in log2(n) hops, for tensors so short that hops count and bytes do not."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigbatch.comm.algorithms.hierarchical import hierarchical_allreduce_
from bigbatch.comm.algorithms.ring import Announce, make_across, require_flat
from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import Backend
from bigbatch.comm.rendezvous.topology import Topology


def make_doubling(*, backend: Backend, topology: Topology, wire: Wire, **_: object) -> Callable[[Tensor], None]:
    """Return the hierarchical all-reduce whose leaders sum by recursive doubling. Collective: it makes groups."""
    node = backend.new_group(topology.groups)
    across = make_across(doubling_allreduce_, topology.leaders, backend=backend, wire=wire)
    return lambda buffer_N: hierarchical_allreduce_(buffer_N, backend, node=node, across=across, wire=wire)


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
