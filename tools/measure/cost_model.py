"""Model the time of an all-reduce from latency, bandwidth and sizes. Does not import torch.

Symbols, as in the papers: M bytes, P ranks on m nodes of k ranks (uneven: k of the fullest node), a seconds per
message (latency), b seconds per byte (inverse bandwidth), g seconds to sum a byte. Links carry both directions at
once. The formulas describe hops in lockstep: pipelining can be faster, and contention for cores is not modelled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

SecondsOf = Callable[[int], float]
"""Takes bytes, returns seconds of their all-reduce."""


@dataclass(frozen=True)
class LinkModel:
    """Cost of a message: latency_seconds + num_bytes / bytes_per_second."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds from the start of a message to its arrival."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class ClusterModel:
    """Nodes, and the links in and between them; `across` is one node's whole connection to the others.

    Raises: ValueError without nodes, or for a node without ranks.
    """

    group_sizes: tuple[int, ...]
    inside: LinkModel
    across: LinkModel
    sum_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not self.group_sizes or min(self.group_sizes) < 1:
            raise ValueError(f"group_sizes={self.group_sizes} must name at least one node, each of at least one rank")

    @property
    def world_size(self) -> int:
        """Return P: the number of ranks."""
        return sum(self.group_sizes)

    @property
    def num_nodes(self) -> int:
        """Return m: the number of nodes."""
        return len(self.group_sizes)

    @property
    def node_size(self) -> int:
        """Return k: the number of ranks of the fullest node."""
        return max(self.group_sizes)


@dataclass(frozen=True)
class Backward:
    """One backward pass: when each gradient is ready and when all is computed, in seconds since its start."""

    ready_seconds: Mapping[str, float]
    seconds: float


def ring_seconds(num_bytes: float, cluster: ClusterModel) -> float:
    """Return a flat ring's seconds: 2(P-1)a + 2(P-1)/P * M*b + (P-1)/P * M*g, with a and b of the slowest hop.

    Source: Patarasuk and Yuan 2009; Thakur, Rabenseifner and Gropp 2005 (the form with g).
    """
    P, part = cluster.world_size, num_bytes / cluster.world_size
    hops = [cluster.inside] * (cluster.node_size > 1) + [cluster.across] * (cluster.num_nodes > 1)
    slowest = max((hop.seconds(part) for hop in hops), default=0.0)
    return 2 * (P - 1) * slowest + (P - 1) * part * cluster.sum_seconds_per_byte


def hierarchical_seconds(num_bytes: float, cluster: ClusterModel) -> float:
    """Return seconds of reduce, leaders' ring, broadcast: 4(k-1) hops of M/k inside and 2(m-1) hops of M/m across.

    Sums: (k-1)/k * M*g inside and (m-1)/m * M*g across. Inside, reduce and broadcast are two ring passes each.
    Source: Jia et al. 2018 (arXiv 1807.11205), 4(k-1) + 2(P/k-1) steps.
    """
    k, m = cluster.node_size, cluster.num_nodes
    inside = 4 * (k - 1) * cluster.inside.seconds(num_bytes / k)
    across = 2 * (m - 1) * cluster.across.seconds(num_bytes / m)
    return inside + across + ((k - 1) / k + (m - 1) / m) * num_bytes * cluster.sum_seconds_per_byte


def doubling_seconds(num_bytes: float, cluster: ClusterModel) -> float:
    """Return the seconds of reduce to a leader, recursive doubling between leaders, broadcast, for short tensors.

    Across, log2(m) hops of all M bytes, and a sum of M in each. If m is not a power of two, log2 of the next lower
    power, with a hop and a sum before and a hop after. Inside, the leader exchanges M with each rank of its node:
    2a + 2(k-1) * M*b, and (k-1) * M*g.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    k, m = cluster.node_size, cluster.num_nodes
    hops = m.bit_length() - 1
    rest = m > 1 << hops
    inside = 2 * cluster.inside.seconds((k - 1) * num_bytes) if k > 1 else 0.0
    across = (hops + 2 * rest) * cluster.across.seconds(num_bytes)
    return inside + across + (k - 1 + hops + rest) * num_bytes * cluster.sum_seconds_per_byte


def sharded_seconds(num_bytes: float, cluster: ClusterModel) -> float:
    """Return a torus's seconds: 2(k-1) hops of M/k inside, and k rings of M/k across at once, which share a link.

    2(k-1)(a + M/k * b) inside and 2(m-1)(a + M/m * b) across, sums (k-1)/k * M*g and (m-1)/m * M/k * g.
    Uneven nodes have s shards, one per rank of the smallest node, and reduce and broadcast them one by one inside:
    4(k-1)(s*a + M/k * b), and sums (m-1)/m * M/s * g across.
    Source: Mikami et al. 2018 (arXiv 1811.05233), 2(X-1) + 2(Y-1) steps.
    """
    k, m, shards = cluster.node_size, cluster.num_nodes, min(cluster.group_sizes)
    if shards == k:
        inside = 2 * (k - 1) * cluster.inside.seconds(num_bytes / k)
    else:
        inside = 4 * (k - 1) * shards * cluster.inside.seconds(num_bytes / shards / k)
    across = 2 * (m - 1) * cluster.across.seconds(num_bytes / m)
    return inside + across + ((k - 1) / k + (m - 1) / m / shards) * num_bytes * cluster.sum_seconds_per_byte


MODELS: Mapping[str, Callable[[float, ClusterModel], float]] = {
    "ring": ring_seconds,
    "hierarchical": hierarchical_seconds,
    "sharded": sharded_seconds,
    "doubling": doubling_seconds,
}
"""The algorithms with known steps; a backend's own ("native") is not among them."""


def lower_bound_seconds(num_bytes: float, *, num_nodes: int, bytes_per_second: float) -> float:
    """Return the least seconds that links allow: every node sends and receives 2(m-1)/m * M bytes; 0 for one node.

    Source: Patarasuk and Yuan 2009, the bandwidth-optimal all-reduce.
    """
    return 2 * (num_nodes - 1) / num_nodes * num_bytes / bytes_per_second
