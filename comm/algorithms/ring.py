"""The ring: bandwidth-optimal, with latency linear in the number of ranks."""

from collections.abc import Callable, Sequence

from torch import Tensor

from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import Backend, Done, InFlight

SEGMENT_BYTES = 512 * 1024
"""A part travels in segments of about this size, so that summing one overlaps with the transfer of the next."""

Announce = Callable[[int], None]
"""(index of a part): called when that part of the tensor has its final value."""


def ring_order(num_ranks: int, place: int) -> tuple[int, ...]:
    """List the parts of the tensor in the order in which the rank at this place of a ring gets their final values."""
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

    Collective over ranks. others are further tensors of this rank's node that it brings into the sum.
    Sends 2 * nbytes * (n - 1) / n per rank in 2 * (n - 1) hops. Each part is summed along one path and then copied,
    so all ranks end with identical bits.
    Raises: ValueError if own_N is not flat and contiguous.
    Source: Patarasuk and Yuan 2009.
    """
    require_flat(own_N)
    ring = _Ring(own_N, backend, ranks, wire, staging, others)
    pending = [ring.fold_and_pass_on(0, segment, received=False) for segment in ring.segments]
    for hop in range(1, ring.num_ranks):
        for segment in ring.segments:
            pending[segment].wait()
            pending[segment] = ring.fold_and_pass_on(hop, segment, received=True)
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
    """Follows one tensor on its way around: its parts and segments, and the hops that carry them.

    At hop h this rank holds part place - h. Hops 0 to n - 1 sum, the further ones copy.
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
        self._backend, self._wire = backend, wire
        self._left, self._right = ranks[self._place - 1], ranks[(self._place + 1) % n]
        dtype = wire.of(own_N)
        # the first parts may have one element more, and all must be cut into equally many segments
        largest = -(-own_N.numel() // n)
        num_segments = max(1, -(-largest * dtype.itemsize // SEGMENT_BYTES))
        self.segments = range(num_segments)
        self._own = _cut(own_N, n, num_segments)
        self._others = [_cut(other_N, n, num_segments) for other_N in others]
        packed_N = own_N if dtype == own_N.dtype else staging.take("packed", own_N.numel(), own_N, dtype)
        self._packed = _cut(packed_N, n, num_segments)
        slot = -(-largest // num_segments)
        # room for one part only: parts arrive one after another, and each is summed before the next
        self._slots = staging.take("incoming", slot * num_segments, own_N, dtype).split(slot) if largest else ()

    def part(self, hop: int) -> int:
        return (self._place - hop) % self.num_ranks

    def fold_and_pass_on(self, hop: int, segment: int, *, received: bool) -> InFlight:
        """Add this node's share of a part to what came from the left, and send it to the right."""
        part, wire = self.part(hop), self._wire
        own_S, packed_S = self._own[part][segment], self._packed[part][segment]
        wire.divide_(own_S)
        # each hop visits another part, so every value is divided, and every other rank added, once
        wire.add_(own_S, [other[part][segment] for other in self._others], scaled=True)
        if received:
            wire.add_(own_S, [self._incoming(part, segment)])
        outgoing_S = wire.pack(own_S, packed_S)
        if hop == self.num_ranks - 1:  # the sum is complete
            # keep the rounded sum that the others will get, not the exact one: identical bits on all ranks
            wire.unpack_(own_S, outgoing_S)
        return self._pass_on(hop, segment, outgoing_S)

    def keep_and_pass_on(self, hop: int, segment: int) -> InFlight:
        """Keep a final value that came from the left, and send it to the right."""
        part = self.part(hop)
        self._wire.unpack_(self._own[part][segment], self._packed[part][segment])
        return self._pass_on(hop, segment, self._packed[part][segment])

    def _incoming(self, part: int, segment: int) -> Tensor:
        """Return where the segment of a part waits to be added; the slot was read a hop ago."""
        return self._slots[segment][: self._own[part][segment].numel()] if self._slots else self._own[part][segment]

    def _pass_on(self, hop: int, segment: int, outgoing_S: Tensor) -> InFlight:
        if hop == 2 * self.num_ranks - 2:  # everybody has it
            return Done()
        part = self.part(hop + 1)
        sums = hop + 1 < self.num_ranks
        # a partial sum must not overwrite this rank's own share; a final value may land in place
        target_S = self._incoming(part, segment) if sums else self._packed[part][segment]
        return self._backend.start_exchange(send=outgoing_S, to=self._right, receive=target_S, source=self._left)


def require_flat(tensor_N: Tensor) -> None:
    """Refuse what is not flat. Raises: ValueError for a tensor that cannot be cut into parts without copies."""
    if tensor_N.dim() != 1 or not tensor_N.is_contiguous():
        raise ValueError(f"an all-reduce needs a flat, contiguous tensor, not shape {tuple(tensor_N.shape)}")


def _cut(tensor_N: Tensor, num_parts: int, num_segments: int) -> list[tuple[Tensor, ...]]:
    return [part.tensor_split(num_segments) for part in tensor_N.tensor_split(num_parts)]
