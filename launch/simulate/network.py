"""Seconds of one all-reduce, by what carries it: NCCL, sockets, MPI in host memory, parameter servers. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

from bigbatch.comm.measure.cost_model import MODELS, ClusterModel, LinkModel
from bigbatch.launch.simulate.constants import DEFAULTS, GIGABIT, Constants

Carrier = Literal["nccl", "sockets", "host", "servers"]

ALGORITHMS = ("native", *MODELS)
WIDENS = ("native", "doubling")
"""What sends sums in fp32 of half-precision terms as fp32: doubling has partial sums of whole buffers, and a library of
its own would round each addition, so that runs give it fp32."""
BY_SIZE = "hybrid"
"""For each buffer the fastest of these."""


@dataclass(frozen=True)
class Network:
    """Describes nodes, what links them, and the library that sums over them.

    inside: bytes per second and direction of a device; across: the same of a node's whole connection to the others.
    """

    num_nodes: int
    devices_per_node: int
    inside_bytes_per_second: float
    across_bytes_per_second: float
    carrier: Carrier = "nccl"
    has_trees: bool = True
    """False for NCCL before 2.4, whose only form is the ring."""
    num_servers: int | None = None
    constants: Constants = DEFAULTS

    @property
    def num_devices(self) -> int:
        """Count the ranks."""
        return self.num_nodes * self.devices_per_node

    def cluster(self) -> ClusterModel:
        """Return the same as the closed forms take it."""
        return ClusterModel(
            (self.devices_per_node,) * self.num_nodes,
            inside=LinkModel(self.constants.inside_latency_seconds, self.inside_bytes_per_second),
            across=LinkModel(self.constants.across_latency_seconds, self.across_bytes_per_second),
        )

    def seconds(self, num_bytes: float, algorithm: str = "native", *, widened: float = 1.0) -> float:
        """Compute one all-reduce; algorithm: one of cost_model's, native, the carrier's own, or the fastest by size.

        widened: how many times these bytes their sums have, which WIDENS send.
        """
        if self.num_devices == 1:
            return 0.0
        if algorithm == BY_SIZE:
            return self.seconds(num_bytes, self.fastest(num_bytes, widened=widened), widened=widened)
        if algorithm in WIDENS:
            num_bytes *= widened
        if algorithm != "native":
            return MODELS[algorithm](num_bytes, self.cluster())
        if self.carrier == "servers":
            return self._servers(num_bytes)
        if self.carrier == "host":
            P = self.num_devices
            return 2 * (P - 1) / P * num_bytes / self.constants.host_bytes_per_second
        return self._nccl(num_bytes)

    def fastest(self, num_bytes: float, *, widened: float = 1.0) -> str:
        """Name the algorithm that takes the least time."""
        return min(ALGORITHMS, key=lambda name: self.seconds(num_bytes, name, widened=widened))

    def _nccl(self, num_bytes: float) -> float:
        """Compute NCCL's ring or double tree, whichever is faster: pipelined, so the slowest link counts.

        Bytes: 2(k-1)/k * M inside and 2(m-1)/m * M over each node's links. Hops: 2(P-m) inside and 2m across of a
        ring; 2(k-1) and 2 log2(m) of a tree. Source: NCCL's own model, src/graph/tuning.cc.
        """
        m, k, P = self.num_nodes, self.devices_per_node, self.num_devices
        inside = 2 * (k - 1) / k * num_bytes / self.inside_bytes_per_second
        across = 2 * (m - 1) / m * num_bytes / self.across_bytes_per_second if m > 1 else 0.0
        if not self.has_trees:
            return max(inside, across) + 2 * P * self.constants.old_hop_seconds
        near, far = self.constants.inside_latency_seconds, self.constants.across_latency_seconds
        ring = 2 * (P - m) * near + (2 * m * far if m > 1 else 0.0)
        tree = 2 * (k - 1) * near + 2 * math.log2(m) * far
        return max(inside, across) + min(ring, tree)

    def _servers(self, num_bytes: float) -> float:
        """Compute how long each of s servers receives its part of all other nodes' gradients: (m-1) * M/s."""
        servers = min(self.num_nodes, self.num_servers or self.constants.most_servers)
        return (self.num_nodes - 1) * num_bytes / servers / self.across_bytes_per_second


def across_bytes_per_second(gbit_per_s: float | None, *, devices_per_node: int, constants: Constants) -> float:
    """Return what a node's links carry of an all-reduce; None where their rate is not stated."""
    stated = devices_per_node * constants.unstated_gbit_per_device if gbit_per_s is None else gbit_per_s
    return stated * GIGABIT * constants.link_share
