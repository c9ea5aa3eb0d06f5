"""Payload and messages of an all-reduce between nodes, from sizes and places alone; no torch.

The closed forms of cost_model give seconds of equal parts; these count to the byte, also for unequal parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LENGTH_BYTES = 8
"""Bytes of the length before each message of backend tcp."""
SEGMENT_BYTES = 512 * 1024
"""Same as in comm.algorithms.ring, which needs torch; a test compares the two."""

Hop = tuple[int, int, int]
"""From, to, and number of elements."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and messages of one direction."""

    payload_bytes: int = 0
    num_messages: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        """Add both."""
        return Traffic(self.payload_bytes + other.payload_bytes, self.num_messages + other.num_messages)

    @property
    def stream_bytes(self) -> int:
        """Return the bytes in the streams of backend tcp: payload, and each message's length; no headers."""
        return self.payload_bytes + LENGTH_BYTES * self.num_messages


def node_traffic(
    algorithm: str, num_elements: int, *, element_bytes: int, groups: Sequence[Sequence[int]], segment_bytes: int
) -> dict[tuple[int, int], Traffic]:
    """Count what each node sends to each other in one all-reduce over backend tcp, summed in its own precision.

    groups: the ranks of each node; hierarchical and sharded are those with shared memory inside. segment_bytes: of
    comm.algorithms.ring. Raises: ValueError for an algorithm with unknown messages.
    """
    node_of = {rank: node for node, ranks in enumerate(groups) for rank in ranks}
    counted: dict[tuple[int, int], Traffic] = {}
    for sender, receiver, count, segments in _sends(algorithm, num_elements, element_bytes, groups, segment_bytes):
        way = node_of[sender], node_of[receiver]
        if way[0] != way[1]:
            counted[way] = counted.get(way, Traffic()) + Traffic(count * element_bytes, segments)
    return counted


@dataclass(frozen=True)
class Sent:
    """What the first rank sends to anyone, and its node to other nodes; no other sends an element more."""

    rank: Traffic
    node: Traffic


def first_sends(
    algorithm: str, num_elements: int, *, element_bytes: int, num_nodes: int, node_size: int, segment_bytes: int
) -> Sent:
    """Count one all-reduce over full nodes without listing its hops: for 100,000 ranks these are 2e10.

    Between nodes to the byte, as node_traffic does; inside them in the hops of cost_model's forms: four passes of a
    ring for hierarchical, two for sharded, the leader's broadcast for doubling.
    Raises: ValueError for an algorithm with unknown messages.
    """
    m, k = num_nodes, node_size

    def pass_on(count: int, num_ranks: int, place: int = 0, *, segments: int | None = None) -> Traffic:
        """Send all parts twice, except the two that the last hops would bring back."""
        if num_ranks == 1:
            return Traffic()
        missed = sum(_part(count, num_ranks, (place + after) % num_ranks) for after in (1, 2))
        each = segments or max(1, -(-_part(count, num_ranks, 0) * element_bytes // segment_bytes))
        return Traffic((2 * count - missed) * element_bytes, 2 * (num_ranks - 1) * each)

    if algorithm == "ring":
        # the last rank of the first node sends what leaves it
        return Sent(pass_on(num_elements, m * k), pass_on(num_elements, m * k, k - 1) if m > 1 else Traffic())
    inside = pass_on(num_elements, k, segments=1)
    if algorithm == "hierarchical":
        across = pass_on(num_elements, m)
        return Sent(inside + inside + across, across)
    if algorithm == "sharded":
        rings = [pass_on(_part(num_elements, k, place), m) for place in range(k)]
        return Sent(inside + rings[0], sum(rings, Traffic()))
    if algorithm == "doubling":
        hops = m.bit_length() - 1
        hops += m > 1 << hops
        across = Traffic(hops * num_elements * element_bytes, hops)
        return Sent(Traffic((k - 1) * num_elements * element_bytes, k - 1) + across, across)
    raise ValueError(f"the messages of {algorithm} are not known")


def _sends(
    algorithm: str, num_elements: int, element_bytes: int, groups: Sequence[Sequence[int]], segment_bytes: int
) -> Iterator[tuple[int, int, int, int]]:
    """List (from, to, elements, messages)."""
    leaders = [ranks[0] for ranks in groups]
    if algorithm == "doubling":
        yield from ((*hop, 1) for hop in _doubling(num_elements, leaders))
        return
    rings: dict[str, list[tuple[Sequence[int], int]]] = {
        "ring": [([rank for ranks in groups for rank in ranks], num_elements)],
        "hierarchical": [(leaders, num_elements)],
        "sharded": [
            ([ranks[place] for ranks in groups], size)
            for place, size in enumerate(_split(num_elements, min(len(ranks) for ranks in groups)))
        ],
    }
    if algorithm not in rings:
        raise ValueError(f"the messages of {algorithm} are not known, only those of {', '.join((*rings, 'doubling'))}")
    for ranks, size in rings[algorithm]:
        largest = -(-size // len(ranks)) * element_bytes
        segments = max(1, -(-largest // segment_bytes))
        yield from ((*hop, segments) for hop in _ring(size, ranks))


def _ring(num_elements: int, ranks: Sequence[int]) -> Iterator[Hop]:
    """Send part place - h at hop h to the right, at each of 2 (n - 1) hops."""
    n, parts = len(ranks), _split(num_elements, len(ranks))
    for place, rank in enumerate(ranks):
        yield from ((rank, ranks[(place + 1) % n], parts[(place - hop) % n]) for hop in range(2 * (n - 1)))


def _doubling(num_elements: int, ranks: Sequence[int]) -> Iterator[Hop]:
    """Exchange all with the partner at the place with one bit flipped; places beyond a power of two hand in and get."""
    even = 1 << (len(ranks).bit_length() - 1)
    for place in range(even, len(ranks)):
        yield (ranks[place], ranks[place - even], num_elements)
        yield (ranks[place - even], ranks[place], num_elements)
    distance = 1
    while distance < even:
        yield from ((ranks[place], ranks[place ^ distance], num_elements) for place in range(even))
        distance *= 2


def _split(num_elements: int, count: int) -> list[int]:
    """Cut as torch.tensor_split does: the first parts have one more."""
    return [_part(num_elements, count, place) for place in range(count)]


def _part(num_elements: int, count: int, place: int) -> int:
    return num_elements // count + (place < num_elements % count)
