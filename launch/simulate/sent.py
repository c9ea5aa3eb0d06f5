"""What a rank and a node send in one step: bytes and messages of all buffers. Pure."""

from dataclasses import dataclass

from bigbatch.comm.tuning.traffic import SEGMENT_BYTES, Sent, Traffic, first_sends
from bigbatch.launch.simulate.step import Job, SimulatedStep

WIDE_BYTES = 4
"""Of an element that doubling sends where half precision is summed in fp32: its partial sums travel."""


@dataclass(frozen=True)
class SentPerStep:
    """Counts what the first rank sends to anyone, and its node to other nodes. None: nobody knows."""

    rank_bytes: int | None
    rank_messages: int | None
    node_bytes: int | None
    node_messages: int | None


def sent_per_step(job: Job, step: SimulatedStep, *, sums_in_fp32: bool) -> SentPerStep:
    """Count the gradients' sums of one step.

    A library of its own (native) has no messages to count; its bytes are the mean over ranks and nodes of any form
    that sends no more than it must: 2(n-1)/n. Parameter servers' are not known.
    """
    network = job.network
    if network.num_devices == 1:
        return SentPerStep(0, 0, 0, 0)
    if network.carrier == "servers":
        return SentPerStep(None, None, None, None)
    all_elements = job.shape.num_parameters
    counts = [each.num_bytes // job.element_bytes for each in step.transfers] or [all_elements]
    element_bytes = round(job.element_bytes * job.wire_share)
    if job.algorithm == "native":
        num_bytes = all_elements * element_bytes
        rank, node = (round(2 * (n - 1) * num_bytes / n) for n in (network.num_devices, network.num_nodes))
        return SentPerStep(rank, None, node, None if network.num_nodes > 1 else 0)
    if job.algorithm == "doubling" and sums_in_fp32:
        element_bytes = max(element_bytes, WIDE_BYTES)
    total = Sent(Traffic(), Traffic())
    for count in counts:
        each = first_sends(
            job.algorithm,
            count,
            element_bytes=element_bytes,
            num_nodes=network.num_nodes,
            node_size=network.devices_per_node,
            segment_bytes=SEGMENT_BYTES,
        )
        total = Sent(total.rank + each.rank, total.node + each.node)
    rank_, node_ = total.rank, total.node
    return SentPerStep(rank_.payload_bytes, rank_.num_messages, node_.payload_bytes, node_.num_messages)
