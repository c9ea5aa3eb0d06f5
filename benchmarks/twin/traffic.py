"""Messages of an all-reduce between nodes, hop by hop: to the byte, also for groups of unequal sizes."""

from collections.abc import Iterator, Sequence

from bigbatch.tools.simulate.traffic import Traffic, part_size

HEADER_BYTES = 25
"""Bytes before each message of backend tcp: 8 for its length, 17 for the tag of its operation."""
Hop = tuple[int, int, int]
"""From, to, and number of elements."""


def node_traffic(
    algorithm: str, num_elements: int, *, element_bytes: int, groups: Sequence[Sequence[int]], segment_bytes: int
) -> dict[tuple[int, int], Traffic]:
    """Return the traffic from each node to each other one in an all-reduce over backend tcp, in its own precision.

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


def stream_bytes(traffic: Traffic) -> int:
    """Return the bytes in the streams of backend tcp: payload, and what precedes each message; no headers."""
    return traffic.payload_bytes + HEADER_BYTES * traffic.num_messages


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
    """Exchange all with the partner whose place differs in one bit; places beyond a power of two send and get."""
    even = 1 << (len(ranks).bit_length() - 1)
    for place in range(even, len(ranks)):
        yield (ranks[place], ranks[place - even], num_elements)
        yield (ranks[place - even], ranks[place], num_elements)
    distance = 1
    while distance < even:
        yield from ((ranks[place], ranks[place ^ distance], num_elements) for place in range(even))
        distance *= 2


def _split(num_elements: int, count: int) -> list[int]:
    """Return sizes of parts as torch.tensor_split cuts them: the first parts have one element more."""
    return [part_size(num_elements, count, place) for place in range(count)]
