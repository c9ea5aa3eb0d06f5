"""The ring: bandwidth-optimal, with latency linear in the number of ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import Backend, InFlight
from bigbatch.comm.rendezvous.topology import Topology

SEGMENT_BYTES = 512 * 1024
"""A part travels in segments of about this size, so that summing one overlaps with the transfer of the next."""

HOPS_AT_ONCE = 4
"""With sums in fp32, this many transfers of a part are under way at once to the rank that sums it."""

Announce = Callable[[int], None]
"""(index of a part): called when that part of the tensor has its final value."""
Across = Callable[[Tensor, Sequence[Tensor], Announce], None]
"""(own_N, others, announce): all-reduces one shard across nodes, in place: adds `others` (the shard's copies from the
other ranks of this node) to own_N, and sums the result with the owners of the same shard on other nodes."""


def make_across(all_reduce_: Callable[..., None], ranks: Sequence[int], *, backend: Backend, wire: Wire) -> Across:
    """Return an all-reduce over some ranks, with its scratch memory."""
    staging = Staging()

    def across(own_N: Tensor, others: Sequence[Tensor], announce: Announce) -> None:
        all_reduce_(own_N, backend, ranks, wire=wire, staging=staging, others=others, announce=announce)

    return across


def make_ring(*, backend: Backend, topology: Topology, wire: Wire, **_: object) -> Callable[[Tensor], None]:
    """Return the ring over all ranks, host by host. Not collective."""
    across = make_across(ring_allreduce_, topology.ring, backend=backend, wire=wire)
    return lambda buffer_N: across(buffer_N, (), lambda part: None)


def ring_order(num_ranks: int, place: int) -> tuple[int, ...]:
    """Return the parts of a tensor in the order in which the rank at this place of a ring gets their final values."""
    return tuple((place + 1 - hop) % num_ranks for hop in range(num_ranks))


def ring_allreduce_(
    own_N: Tensor,
    backend: Backend,
    ranks: Sequence[int],
    *,
    wire: Wire,
    staging: Staging,
    others: Sequence[Tensor] = (),
    announce: Announce = lambda part: None,
) -> None:
    """Sum own_N over ranks (in ring order), in place, in two passes around the ring.

    Collective over ranks. Sends 2 * nbytes * (n - 1) / n per rank in 2 * (n - 1) hops. If the wire sums in fp32 (see
    Wire), the first pass is a direct reduce-scatter: each rank sends every part to the rank that sums it. The number of
    bytes and messages is the same. others: more tensors of this rank's node to add to the sum. Each part is summed by
    one path and then copied, so all ranks end with identical bits.
    Raises: ValueError if own_N is not flat and contiguous.
    Source: Patarasuk and Yuan 2009.
    """
    require_flat(own_N)
    ring = _Ring(own_N, backend, ranks, wire, staging, others)
    pending = ring.sum_in_fp32() if wire.sums_in_fp32(own_N) else ring.sum_hop_by_hop()
    # the part that completed its sum here is final one hop before the first copy arrives
    announce(ring.part(ring.num_ranks - 1))
    for hop in range(ring.num_ranks, 2 * ring.num_ranks - 1):
        for segment in ring.segments:
            pending[segment].wait()
            pending[segment] = ring.keep_and_pass_on(hop, segment)
        announce(ring.part(hop))
    for work in pending:
        work.wait()


class _Ring:
    """State of one tensor in the ring: its parts and segments, and the hops that carry them.

    At hop h this rank holds part (place - h) modulo n. Hops 0 to n - 1 sum, hops n to 2n - 2 copy.
    """

    def __init__(
        self,
        own_N: Tensor,
        backend: Backend,
        ranks: Sequence[int],
        wire: Wire,
        staging: Staging,
        others: Sequence[Tensor],
    ) -> None:
        self.num_ranks = n = len(ranks)
        self._place = list(ranks).index(backend.rank)
        self._backend, self._wire, self._ranks = backend, wire, ranks
        self._left, self._right = ranks[self._place - 1], ranks[(self._place + 1) % n]
        dtype = wire.of(own_N)
        # the first parts may have one element more than others, but all have the same number of segments
        largest = -(-own_N.numel() // n)
        num_segments = max(1, -(-largest * dtype.itemsize // SEGMENT_BYTES))
        self.segments = range(num_segments)
        self._own = _cut(own_N, n, num_segments)
        self._others = [_cut(other_N, n, num_segments) for other_N in others]
        self._packed = self._own
        if dtype != own_N.dtype:
            self._packed = _cut(staging.take("packed", own_N.numel(), own_N, dtype), n, num_segments)
        slot = -(-largest // num_segments)
        # room for one part: each is summed before the next arrives; with sums in fp32 for several
        room = slot * num_segments * (min(HOPS_AT_ONCE, max(1, n - 1)) if wire.sums_in_fp32(own_N) else 1)
        self._slots = staging.take("incoming", room, own_N, dtype).split(slot) if largest else ()

    def part(self, hop: int) -> int:
        return (self._place - hop) % self.num_ranks

    def sum_hop_by_hop(self) -> list[InFlight]:
        """Sum each part along the ring, rounded to the wire's precision at each hop; return the transfers."""
        pending = [self._fold_and_pass_on(0, segment, received=False) for segment in self.segments]
        for hop in range(1, self.num_ranks):
            for segment in self.segments:
                pending[segment].wait()
                pending[segment] = self._fold_and_pass_on(hop, segment, received=True)
        return pending

    def sum_in_fp32(self) -> list[InFlight]:
        """Send each part to the rank that sums it; return the transfers of the finished part to the next rank.

        Adds in the order of the hops, not of arrival: addition rounds, and a repeated run must give the same bits.
        """
        n, mine = self.num_ranks, self.part(self.num_ranks - 1)
        totals = [self._start_total(mine, segment) for segment in self.segments]
        if n == 1:
            return [self._complete(mine, segment, total_S) for segment, total_S in enumerate(totals)]
        coming = [[self._hand_over(hop, segment) for segment in self.segments] for hop in range(1, n)[:HOPS_AT_ONCE]]
        pending: list[InFlight] = []
        for hop in range(1, n):
            for segment in self.segments:
                coming[hop - 1][segment].wait()
                totals[segment].add_(self._incoming(mine, segment, hop=hop))
                if hop == n - 1:  # this segment's sum travels on while the next segment arrives
                    pending.append(self._complete(mine, segment, totals[segment]))
            if hop + HOPS_AT_ONCE < n:  # into the slots that have been read
                coming.append([self._hand_over(hop + HOPS_AT_ONCE, segment) for segment in self.segments])
        return pending

    def _start_total(self, part: int, segment: int) -> Tensor:
        """Return this node's sum of a part's segment in fp32, not rounded: own_S itself if that is fp32."""
        own_S = self._own[part][segment]
        if own_S.dtype == torch.float32:
            return self._fold_node(part, segment)[0]
        total_S = own_S.float()
        for other in self._others:
            total_S.add_(other[part][segment])
        return total_S

    def _hand_over(self, hop: int, segment: int) -> InFlight:
        """Send this node's segment to the rank `hop` places to the right; receive one from `hop` places to the left."""
        n, ranks = self.num_ranks, self._ranks
        own_S, packed_S = self._fold_node(self.part(-hop - 1), segment)
        return self._backend.start_exchange(
            send=self._wire.pack(own_S, packed_S),
            to=ranks[(self._place + hop) % n],
            receive=self._incoming(self.part(n - 1), segment, hop=hop),
            source=ranks[self._place - hop],
        )

    def _complete(self, part: int, segment: int, total_S: Tensor) -> InFlight:
        own_S, packed_S = self._own[part][segment], self._packed[part][segment]
        if total_S is not own_S:
            own_S.copy_(total_S)
        outgoing_S = self._wire.pack(own_S, packed_S)
        self._wire.unpack_(own_S, outgoing_S)
        return self._pass_on(self.num_ranks - 1, segment, outgoing_S)

    def _fold_node(self, part: int, segment: int) -> tuple[Tensor, Tensor]:
        """Add the others of this node to a segment of own_N; return it and its packed form."""
        own_S, packed_S = self._own[part][segment], self._packed[part][segment]
        self._wire.divide_(own_S)
        # each hop visits another part, so every value is divided, and every other rank added, once
        self._wire.add_(own_S, [other[part][segment] for other in self._others], scaled=True)
        return own_S, packed_S

    def _fold_and_pass_on(self, hop: int, segment: int, *, received: bool) -> InFlight:
        """Add this node's segment to the one received from the left, if any, and send the sum to the right."""
        part, wire = self.part(hop), self._wire
        own_S, packed_S = self._fold_node(part, segment)
        if received:
            wire.add_(own_S, [self._incoming(part, segment)])
        outgoing_S = wire.pack(own_S, packed_S)
        if hop == self.num_ranks - 1:  # the sum is complete
            # keep the rounded sum that the other ranks will get, so that all have identical bits
            wire.unpack_(own_S, outgoing_S)
        return self._pass_on(hop, segment, outgoing_S)

    def keep_and_pass_on(self, hop: int, segment: int) -> InFlight:
        """Keep a final value received from the left, and send it to the right."""
        part = self.part(hop)
        self._wire.unpack_(self._own[part][segment], self._packed[part][segment])
        return self._pass_on(hop, segment, self._packed[part][segment])

    def _incoming(self, part: int, segment: int, *, hop: int = 0) -> Tensor:
        """Return the buffer for a received segment of a part; its previous content has been read."""
        own_S = self._own[part][segment]
        slots = self._slots[max(0, hop - 1) % HOPS_AT_ONCE * len(self.segments) :]
        return slots[segment][: own_S.numel()] if slots else own_S

    def _pass_on(self, hop: int, segment: int, outgoing_S: Tensor) -> InFlight:
        if hop == 2 * self.num_ranks - 2:  # all ranks have it
            return InFlight()
        part = self.part(hop + 1)
        sums = hop + 1 < self.num_ranks
        # a partial sum must not overwrite this rank's own values; a final value may arrive in place
        target_S = self._incoming(part, segment) if sums else self._packed[part][segment]
        return self._backend.start_exchange(send=outgoing_S, to=self._right, receive=target_S, source=self._left)


def require_flat(tensor_N: Tensor) -> None:
    """Raise ValueError for a tensor that cannot be cut into parts without copies."""
    if tensor_N.dim() != 1 or not tensor_N.is_contiguous():
        raise ValueError(f"an all-reduce needs a flat, contiguous tensor, not shape {tuple(tensor_N.shape)}")


def _cut(tensor_N: Tensor, num_parts: int, num_segments: int) -> list[tuple[Tensor, ...]]:
    return [part.tensor_split(num_segments) for part in tensor_N.tensor_split(num_parts)]
