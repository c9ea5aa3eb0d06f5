"""A host by itself, and what is asked of it: a finding, or a remark."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bigbatch.trainer.machine.limits import Limits
from bigbatch.trainer.machine.network import Card, Port
from bigbatch.trainer.machine.nvidia import Driver


@dataclass(frozen=True)
class Host:
    """Describes a host of the job, by itself. What nobody knows is absent, and no finding."""

    num_ranks: int = 1
    world_size: int = 1
    wants_gpus: bool = True
    """False where the job keeps to the CPU by choice."""
    on_gpus: bool = False
    shares_machine: bool = False
    """With other nodes of the job, as emulated ones do: its links are no hardware's."""
    own_gpus: Sequence[str] = ()
    """UUIDs of its ranks' GPUs."""
    foreign: Mapping[int, str] = field(default_factory=dict)
    """Process of somebody else -> the GPU of ours that it uses."""
    limits: Limits = field(default_factory=Limits)
    cards: Sequence[Card] = ()
    ports: Sequence[Port] = ()
    interface: str | None = None
    """By which ranks reach each other."""
    is_interface_stated: bool = False
    driver: Driver = field(default_factory=Driver)
    gpus_on_bus: int = 0
    has_gpudirect: bool = False
    xids: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    """Counters of its ports' errors, before links were measured."""
    errors_after: Mapping[str, float] = field(default_factory=dict)
    link_gbit_per_second: float | None = None
    """Measured rate of its best pair."""

    @property
    def crosses_nodes(self) -> bool:
        """Say whether some ranks are elsewhere."""
        return self.num_ranks < self.world_size

    @property
    def usable_ports(self) -> list[Port]:
        """List the ports by which NCCL can go."""
        return [
            port for port in self.ports if port.is_usable and (port.link_layer != "Ethernet" or port.has_routable_gid)
        ]


@dataclass(frozen=True)
class Check:
    """Looks for one kind of trouble."""

    name: str
    reads: str
    sign: str
    """When it speaks."""
    remedy: str
    find: Callable[[Host], Iterator[str]]
    """Yields what is the matter, without host and remedy."""
    is_finding: bool = True
    """Else a remark, which ends no job."""
    breaks_links: bool = False
    """NCCL would not connect, so links are not measured."""
