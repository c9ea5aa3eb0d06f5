"""A node in the preflight, and findings on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bigbatch.trainer.machine.gpu_driver import Clock


@dataclass(frozen=True)
class Node:
    """Describes a host of the job: what its first rank says, and the slowest of its ranks' rates."""

    host: str
    versions: Mapping[str, str]
    device: str
    """Devices of its ranks."""
    num_ranks: int = 1
    address: str = ""
    free_gb: Mapping[str, float] = field(default_factory=dict)
    """Free space of each folder that a run writes to."""
    disk_trouble: Mapping[str, str] = field(default_factory=dict)
    """Folder of unknown free space -> reason."""
    images: Mapping[str, int] = field(default_factory=dict)
    """Classes, and images of each split."""
    complaint: str | None = None
    """Why images cannot be counted."""
    gpus: Sequence[str] = ()
    """The driver's line for each GPU."""
    troubles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a check of this host alone -> what it finds."""
    hardware: Mapping[str, str] = field(default_factory=dict)
    """Facts besides versions that must be equal on all hosts."""
    network: Mapping[str, str] = field(default_factory=dict)
    """Its cards and RDMA ports."""
    multiply_gflops: float = 0.0
    copy_gb_per_second: float = 0.0
    clocks: Mapping[int, Clock] = field(default_factory=dict)
    """Rank -> clock of its GPU under load, if the driver reports it."""
    link_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second to other hosts."""
    unreachable: Sequence[str] = ()
    """Hosts that it cannot connect to."""

    @property
    def best_link(self) -> float | None:
        """Return the bytes per second of its fastest link: a slow host is slow to all."""
        return max(self.link_bytes_per_second.values(), default=None)


@dataclass(frozen=True)
class NodeFinding:
    """Names something that is wrong."""

    text: str
    hosts: tuple[str, ...] = ()
    """Hosts to exclude from the job; none if no host is at fault."""
