"""Topology: which ranks form a node group, and which ones communicate. Integers only."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The node groups of a job, as one rank sees them.

    groups[i] are the ranks of node group i in ascending order; the first one is the group's leader. A node group is a
    host or a part of one (Jia et al. 2018 use 16 GPUs); the parts of a host are adjacent.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        return sum(len(group) for group in self.groups)

    @property
    def num_nodes(self) -> int:
        return len(self.groups)

    @property
    def node_rank(self) -> int:
        return next(i for i, group in enumerate(self.groups) if self.rank in group)

    @property
    def node(self) -> tuple[int, ...]:
        return self.groups[self.node_rank]

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return the first rank of each node group: the ring that crosses nodes."""
        return tuple(group[0] for group in self.groups)

    @property
    def smallest_node(self) -> int:
        """Return the size of the smallest node group: the largest number of shards of the sharded form."""
        return min(len(group) for group in self.groups)

    @property
    def ring(self) -> tuple[int, ...]:
        """Return all ranks host by host, so that a flat ring enters and leaves each host once."""
        return tuple(rank for group in self.groups for rank in group)


def make_topology(hosts: Sequence[str], *, rank: int, group_size: int | None = None) -> Topology:
    """Group ranks by host name (hosts[r] is rank r's), then cut each host into groups of group_size.

    Raises: ValueError when group_size is not positive.
    """
    if group_size is not None and group_size < 1:
        raise ValueError(f"group_size={group_size} must be positive, or null for one group per host")
    by_host: dict[str, list[int]] = {}
    for each, host in enumerate(hosts):
        by_host.setdefault(host, []).append(each)
    groups: list[tuple[int, ...]] = []
    for ranks in by_host.values():
        size = group_size or len(ranks)
        groups += [tuple(ranks[i : i + size]) for i in range(0, len(ranks), size)]
    return Topology(rank=rank, groups=tuple(groups))
