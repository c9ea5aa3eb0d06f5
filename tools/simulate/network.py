"""Seconds of one all-reduce over each carrier: NCCL, sockets, MPI in host memory, parameter servers. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

from bigbatch.tools.measure.cost_model import MODELS, ClusterModel, LinkModel
from bigbatch.tools.simulate.constants import DEFAULTS, GIGABIT, Constants

Carrier = Literal["nccl", "sockets", "host", "servers"]

ALGORITHMS = ("native", *MODELS)
LIBRARY_ALGORITHMS = ("native", "hierarchical", "sharded")
"""Algorithms made of NCCL's own sums; as in comm.algorithms, which needs torch: a test compares the two."""
SUMS_IN_FP32 = (*LIBRARY_ALGORITHMS, "doubling")
"""Algorithms that send fp32 sums of half-precision terms as fp32: a library would round each addition, so that
runs give it fp32, and doubling has partial sums of whole buffers."""
LL_LATENCY, LL_RATE = 0.27, 0.25
"""Latency and rate of NCCL's protocol LL, as shares of those of large sums. PUBLISHED: 6.6 us and 0.6 for each hop over
NVLink instead of 8.4 and 3.4, here for 8 devices, and a quarter of a ring's rate (src/graph/tuning.cc)."""
BY_SIZE = "hybrid"
"""Takes the fastest algorithm for each buffer."""


@dataclass(frozen=True)
class Network:
    """Nodes, the links between them, and the library that sums over them.

    inside: bytes per second and direction of a device; across: the same of a node's whole connection to the others.
    """

    num_nodes: int
    devices_per_node: int
    inside_bytes_per_second: float
    across_bytes_per_second: float
    carrier: Carrier = "nccl"
    has_trees: bool = True
    """False for NCCL before 2.4, which has only rings."""
    num_servers: int | None = None
    """Number of parameter servers; None for one in each node."""
    constants: Constants = DEFAULTS

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def crosses_sockets(self) -> bool:
        """Return whether sums travel over TCP: then they start at backward's end."""
        return self.carrier == "sockets" and self.num_nodes > 1

    @property
    def has_few_measurements(self) -> bool:
        """Return whether sums travel over a carrier with few published measurements."""
        return self.crosses_sockets or (self.num_devices > 1 and self.carrier in ("host", "servers"))

    def cluster(self) -> ClusterModel:
        return ClusterModel(
            (self.devices_per_node,) * self.num_nodes,
            inside=LinkModel(self.constants.inside_latency_seconds, self.inside_bytes_per_second),
            across=LinkModel(self.constants.across_latency_seconds, self.across_bytes_per_second),
        )

    def seconds(self, num_bytes: float, algorithm: str = "native", *, widened: float = 1.0) -> float:
        """Return the seconds of one all-reduce; algorithm: one of cost_model's, native (the carrier's own) or BY_SIZE.

        widened: ratio of the bytes of fp32 sums, which SUMS_IN_FP32 send, to num_bytes.
        """
        if self.num_devices == 1:
            return 0.0
        if algorithm == BY_SIZE:
            return self.seconds(num_bytes, self.fastest(num_bytes, widened=widened), widened=widened)
        if algorithm in SUMS_IN_FP32:
            num_bytes *= widened
        if algorithm != "native":
            return MODELS[algorithm](num_bytes, self.cluster())
        if self.carrier == "servers":
            # each of s servers receives its part of all other nodes' gradients: (m-1) * M/s
            servers = self.num_servers or self.num_nodes
            return (self.num_nodes - 1) * num_bytes / servers / self.across_bytes_per_second
        if self.carrier == "host":
            P = self.num_devices
            return 2 * (P - 1) / P * num_bytes / self.constants.host_bytes_per_second
        return self._nccl(num_bytes)

    def fastest(self, num_bytes: float, *, widened: float = 1.0) -> str:
        return min(ALGORITHMS, key=lambda name: self.seconds(num_bytes, name, widened=widened))

    def _nccl(self, num_bytes: float) -> float:
        """Return the seconds of NCCL's ring or double tree, whichever is faster: pipelined, so the slowest link counts.

        Bytes: 2(k-1)/k * M inside and 2(m-1)/m * M over each node's links; of a ring alone 2(P-1)/P * M over each
        link. Hops: 2(P-m) inside and 2m across of a ring; 2(k-1) and 2 log2(m) of a tree. Source: NCCL's own model,
        src/graph/tuning.cc. Sockets have one ring, limited by its connections. Inside a node, small sums take the
        protocol LL, with shorter hops and fewer bytes per second.
        """
        m, k, P, constants = self.num_nodes, self.devices_per_node, self.num_devices, self.constants
        is_ring = self.crosses_sockets or not self.has_trees
        parts = P if is_ring else m
        rate = self.across_bytes_per_second
        if self.crosses_sockets:
            rate = min(rate, constants.connections_gbit_per_s * GIGABIT * constants.link_share)
        inside = 2 * (k - 1) / k * num_bytes / self.inside_bytes_per_second
        across = 2 * (parts - 1) / parts * num_bytes / rate if m > 1 else 0.0
        near, far = constants.inside_latency_seconds, constants.across_latency_seconds
        ring = 2 * (P - m) * near + (2 * m * far if m > 1 else 0.0)
        tree = 2 * (k - 1) * near + 2 * math.log2(m) * far
        if m == 1:
            return min(inside + ring, inside / LL_RATE + LL_LATENCY * ring)
        return max(inside, across) + (ring if is_ring else min(ring, tree))
