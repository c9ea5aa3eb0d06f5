"""A node as preflight sees it, and what may be wrong with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bigbatch.trainer.machine.gpu_driver import Clock


@dataclass(frozen=True)
class Node:
    """Describes a host of the job: what its first rank says, and the slowest of its ranks' rates."""

    host: str
    versions: Mapping[str, str]
    device: str
    """What its ranks compute on."""
    num_ranks: int = 1
    address: str = ""
    free_gb: Mapping[str, float] = field(default_factory=dict)
    disk_trouble: Mapping[str, str] = field(default_factory=dict)
    """Folder -> why nobody can tell what is free there."""
    images: Mapping[str, int] = field(default_factory=dict)
    complaint: str | None = None
    gpus: Sequence[str] = ()
    troubles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a check -> what it finds, whatever the other hosts have."""
    hardware: Mapping[str, str] = field(default_factory=dict)
    """What all hosts need the same of, beside versions."""
    network: Mapping[str, str] = field(default_factory=dict)
    """Its cards and RDMA ports."""
    multiply_gflops: float = 0.0
    copy_gb_per_second: float = 0.0
    clocks: Mapping[int, Clock] = field(default_factory=dict)
    """Rank -> its GPU's, under load, where the driver tells."""
    link_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """To other hosts."""
    unreachable: Sequence[str] = ()
    """Hosts that it cannot connect to."""

    @property
    def best_link(self) -> float | None:
        """Return the bytes per second to the host it reaches fastest: a slow one is slow to all."""
        return max(self.link_bytes_per_second.values(), default=None)


@dataclass(frozen=True)
class NodeFinding:
    """Names something that is wrong."""

    text: str
    hosts: tuple[str, ...] = ()
    """Those that the job should do without; none where it is not a node's fault."""
