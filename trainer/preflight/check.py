"""Facts on one host, and checks on them, which yield findings or remarks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bigbatch.trainer.machine.limits import Limits
from bigbatch.trainer.machine.network import Card, Port
from bigbatch.trainer.machine.nvidia import Driver


@dataclass(frozen=True)
class Host:
    """Describes one host of the job. Unknown facts are absent, and cause no finding."""

    num_ranks: int = 1
    world_size: int = 1
    wants_gpus: bool = True
    """False if the job uses the CPU by choice."""
    on_gpus: bool = False
    shares_machine: bool = False
    """Whether it shares a machine with other nodes, as emulated ones do: its links are then not hardware."""
    own_gpus: Sequence[str] = ()
    """UUIDs of its ranks' GPUs."""
    foreign: Mapping[int, str] = field(default_factory=dict)
    """Process of another job -> the GPU of this job that it uses."""
    limits: Limits = field(default_factory=Limits)
    cards: Sequence[Card] = ()
    ports: Sequence[Port] = ()
    interface: str | None = None
    """Interface through which ranks reach each other."""
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
        """Tell whether some ranks are on other hosts."""
        return self.num_ranks < self.world_size

    @property
    def usable_ports(self) -> list[Port]:
        """List the ports that NCCL can use."""
        return [
            port for port in self.ports if port.is_usable and (port.link_layer != "Ethernet" or port.has_routable_gid)
        ]


@dataclass(frozen=True)
class Check:
    """Check for one kind of fault."""

    name: str
    reads: str
    sign: str
    """Condition under which it reports, in words."""
    remedy: str
    find: Callable[[Host], Iterator[str]]
    """Yields the faults, without host and remedy."""
    is_finding: bool = True
    """False: a remark, which does not end the job."""
    breaks_links: bool = False
    """NCCL would not connect, so links are not measured."""
