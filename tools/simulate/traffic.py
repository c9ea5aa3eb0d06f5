"""Payload and messages of an all-reduce, and of a step, from sizes and places alone; no torch.

The closed forms of cost_model give seconds of equal parts; these count to the byte, also for unequal parts.
"""

from dataclasses import astuple, dataclass

from bigbatch.tools.simulate.network import LIBRARY_ALGORITHMS, SUMS_IN_FP32
from bigbatch.tools.simulate.step import WIDE_BYTES, SimulatedJob, SimulatedStep

SEGMENT_BYTES = 512 * 1024
"""Same as in comm.algorithms.ring, which needs torch; a test compares the two."""


@dataclass(frozen=True)
class Traffic:
    payload_bytes: int = 0
    num_messages: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.payload_bytes + other.payload_bytes, self.num_messages + other.num_messages)


def traffic_of_sum(
    algorithm: str, num_elements: int, *, element_bytes: int, num_nodes: int, node_size: int
) -> tuple[Traffic, Traffic]:
    """Return what the first rank sends to any rank in one all-reduce over full nodes, and its node to other nodes.

    It makes no list of hops: 100,000 ranks have 2e10.

    Between nodes to the byte; inside them in the hops of cost_model's forms: four passes of a
    ring for hierarchical, two for sharded, the leader's broadcast for doubling.
    Raises: ValueError for an algorithm with unknown messages.
    """
    m, k = num_nodes, node_size

    def pass_on(count: int, num_ranks: int, place: int = 0, *, segments: int | None = None) -> Traffic:
        """Return what a rank sends in a ring's two passes: all parts, except one in each pass."""
        if num_ranks == 1:
            return Traffic()
        missed = sum(part_size(count, num_ranks, (place + after) % num_ranks) for after in (1, 2))
        each = segments or max(1, -(-part_size(count, num_ranks, 0) * element_bytes // SEGMENT_BYTES))
        return Traffic((2 * count - missed) * element_bytes, 2 * (num_ranks - 1) * each)

    if algorithm == "ring":
        # the last rank of the first node sends what leaves it
        return (pass_on(num_elements, m * k), pass_on(num_elements, m * k, k - 1) if m > 1 else Traffic())
    inside = pass_on(num_elements, k, segments=1)
    if algorithm == "hierarchical":
        across = pass_on(num_elements, m)
        return (inside + inside + across, across)
    if algorithm == "sharded":
        rings = [pass_on(part_size(num_elements, k, place), m) for place in range(k)]
        return (inside + rings[0], sum(rings, Traffic()))
    if algorithm == "doubling":
        hops = m.bit_length() - 1
        hops += m > 1 << hops
        across = Traffic(hops * num_elements * element_bytes, hops)
        return (Traffic((k - 1) * num_elements * element_bytes, k - 1) + across, across)
    raise ValueError(f"the messages of {algorithm} are not known")


def part_size(num_elements: int, count: int, place: int) -> int:
    """Return the elements of one of count parts, as torch.tensor_split cuts: the first parts have one more."""
    return num_elements // count + (place < num_elements % count)


@dataclass(frozen=True)
class SentPerStep:
    """What the first rank sends to any rank, and its node to other nodes. None: unknown.

    If parts are unequal, another rank may send a few elements more of a buffer.
    """

    rank_bytes: int | None
    rank_messages: int | None
    node_bytes: int | None
    node_messages: int | None


def sent_per_step(job: SimulatedJob, step: SimulatedStep) -> SentPerStep:
    """Return what the gradients' sums of one step send.

    The messages of a library's own sums are unknown. The bytes of native are the mean over ranks, or nodes, of any
    algorithm that sends no more than it must: 2(n-1)/n. Those of parameter servers are unknown.
    """
    network = job.network
    if network.num_devices == 1:
        return SentPerStep(0, 0, 0, 0)
    if network.carrier == "servers":
        return SentPerStep(None, None, None, None)
    counts = [each.num_bytes // job.element_bytes for each in step.transfers] or [job.shape.num_parameters]
    every = [_sent_per_buffer(job, count) for count in counts]
    return SentPerStep(*(None if None in each else sum(each) for each in zip(*map(astuple, every), strict=True)))


def _sent_per_buffer(job: SimulatedJob, num_elements: int) -> SentPerStep:
    network, wire_bytes = job.network, job.element_bytes * job.wire_share
    element_bytes = round(wire_bytes)
    algorithm = job.algorithm_of(num_elements * job.element_bytes)
    if algorithm in SUMS_IN_FP32 and job.sums_in_fp32:
        element_bytes = wire_bytes = max(element_bytes, WIDE_BYTES)
    if algorithm == "native":
        rank, node = (
            round(2 * (n - 1) * num_elements * element_bytes / n) for n in (network.num_devices, network.num_nodes)
        )
        return SentPerStep(rank, None, node, None if network.num_nodes > 1 else 0)
    of_rank, of_node = traffic_of_sum(
        algorithm,
        num_elements,
        element_bytes=element_bytes,
        num_nodes=network.num_nodes,
        node_size=network.devices_per_node,
    )
    # the ratio is 1, unless wire_share leaves no whole number of bytes per element
    rank_bytes, node_bytes = (round(each.payload_bytes * wire_bytes / element_bytes) for each in (of_rank, of_node))
    if algorithm in LIBRARY_ALGORITHMS:
        return SentPerStep(rank_bytes, None, node_bytes, None if network.num_nodes > 1 else 0)
    return SentPerStep(rank_bytes, of_rank.num_messages, node_bytes, of_node.num_messages)
