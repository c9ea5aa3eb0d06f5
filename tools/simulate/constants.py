"""Assumptions of the simulator on hardware and software: each constant has one cause, and none is fitted to one row.

PUBLISHED: read from others' measurements. ASSUMED: set by us so that published rows of many systems are matched, and
then not changed; docs/simulate-errors.md says on which rows, and what the error is.
"""

from dataclasses import dataclass

GIGABIT = 1e9 / 8
"""Bytes per second."""

BACKWARD_SHARE = 2 / 3
"""Backward's share of computing: it has two products for each of forward's. Source: a convolution's operations."""


@dataclass(frozen=True)
class Constants:
    """Constants of the step's model; seconds, bytes per second and shares."""

    seconds_per_tensor: float = 22e-6
    """Fixed time of a step per parameter, at any batch: the least time of its four or five kernels in forward, backward
    and update. ASSUMED, about 5 us each; 3.5 ms for ResNet-50's 161."""
    link_share: float = 0.8
    """Share of a link's stated rate that an all-reduce of large buffers reaches. PUBLISHED: NCCL's tests reach 0.74 to
    0.9 between nodes and 0.78 to 1 over NVLink (ANCHORS D3)."""
    inside_latency_seconds: float = 4e-6
    """Latency of a hop between two GPUs of a node. PUBLISHED: NCCL's own tables of 2019 and later, 3.4 to 5.7 us."""
    across_latency_seconds: float = 20e-6
    """Latency of a hop between nodes. PUBLISHED: NCCL's own tables, 9.6 to 14 us and more over switches; ASSUMED 20."""
    host_bytes_per_second: float = 2.5e9
    """Bandwidth of MPI's all-reduce in host memory. ASSUMED."""
    host_node_seconds: float = 4e-3
    """Time that each doubling of nodes adds to a step with sums in host memory. ASSUMED."""
    connections_gbit_per_s: float = 10.0
    """Largest rate of all TCP connections that NCCL opens between two nodes: of one, also on faster Ethernet.

    PUBLISHED: EC2's limit of a flow in a placement group; NCCL 2.4.6 sent 10.7 of 92 Gbit/s (NVIDIA/nccl, issue 209).
    On EC2 NCCL 2.4.8 and later opens 16."""
    straggler_share: float = 0.004
    """Extra compute time of the slowest of 2, 4, 8 nodes over one node: this share for each doubling. ASSUMED."""
    input_share: float = 0.02
    """Extra time of real images across nodes over one node: their decoding disturbs the slowest node. ASSUMED."""


DEFAULTS = Constants()
