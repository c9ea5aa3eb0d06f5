"""Bytes and messages of all buffers that a rank and a node send in one step. Pure."""

from dataclasses import astuple, dataclass

from bigbatch.launch.simulate.network import WIDENS
from bigbatch.launch.simulate.step import WIDE_BYTES, Job, SimulatedStep
from bigbatch.launch.simulate.traffic import SEGMENT_BYTES, first_sends


@dataclass(frozen=True)
class SentPerStep:
    """What the first rank sends to anyone, and its node to other nodes. None: unknown.

    No other rank sends more than one element more of a buffer.
    """

    rank_bytes: int | None
    rank_messages: int | None
    node_bytes: int | None
    node_messages: int | None


def sent_per_step(job: Job, step: SimulatedStep) -> SentPerStep:
    """Count the gradients' sums of one step.

    A library's own sum (native) has no messages to count; its bytes are the mean over ranks and nodes of any form that
    sends no more than it must: 2(n-1)/n. Parameter servers' are not known.
    """
    network = job.network
    if network.num_devices == 1:
        return SentPerStep(0, 0, 0, 0)
    if network.carrier == "servers":
        return SentPerStep(None, None, None, None)
    counts = [each.num_bytes // job.element_bytes for each in step.transfers] or [job.shape.num_parameters]
    every = [_one_sum(job, count) for count in counts]
    return SentPerStep(*(None if None in each else sum(each) for each in zip(*map(astuple, every), strict=True)))


def _one_sum(job: Job, num_elements: int) -> SentPerStep:
    """Count one buffer's sum."""
    network, wire_bytes = job.network, job.element_bytes * job.wire_share
    element_bytes = round(wire_bytes)
    algorithm = job.algorithm_of(num_elements * job.element_bytes)
    if algorithm in WIDENS and job.sums_in_fp32:
        element_bytes = wire_bytes = max(element_bytes, WIDE_BYTES)
    if algorithm == "native":
        rank, node = (
            round(2 * (n - 1) * num_elements * element_bytes / n) for n in (network.num_devices, network.num_nodes)
        )
        return SentPerStep(rank, None, node, None if network.num_nodes > 1 else 0)
    sent = first_sends(
        algorithm,
        num_elements,
        element_bytes=element_bytes,
        num_nodes=network.num_nodes,
        node_size=network.devices_per_node,
        segment_bytes=SEGMENT_BYTES,
    )
    # a code has its exponents beside its values; else 1
    rank_bytes, node_bytes = (round(each.payload_bytes * wire_bytes / element_bytes) for each in (sent.rank, sent.node))
    return SentPerStep(rank_bytes, sent.rank.num_messages, node_bytes, sent.node.num_messages)
