"""Read this host's network hardware from sysfs: interfaces, and RDMA ports."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mode

from bigbatch.trainer.machine.kernel_files import read_line, read_number, read_text

ERROR_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
"""Error counters of a port: faults of a cable, a plug or a switch (the kernel's ABI, sysfs-class-infiniband)."""
NO_GID = re.compile(r"[0:]*$|fe80:", re.I)
"""Matches an empty GID, and the link-local one that each port has without an IP address: NCCL uses neither."""


@dataclass(frozen=True)
class Card:
    """Describes a network interface that is up and has hardware."""

    name: str
    gbit_per_second: float
    mtu: int


@dataclass(frozen=True)
class Port:
    """Describes a port of InfiniBand, RoCE (link layer: Ethernet), or another kind of RDMA."""

    name: str
    """Device and port number, such as mlx5_0/1."""
    state: str
    """ACTIVE carries data; INIT waits for a subnet manager."""
    physical: str
    gbit_per_second: float
    link_layer: str
    has_routable_gid: bool
    """An address of RoCE v2."""

    @property
    def is_usable(self) -> bool:
        """Return whether the port can carry data of any job."""
        return self.state == "ACTIVE" and self.gbit_per_second > 0


def read_cards(root: Path = Path("/")) -> list[Card]:
    """List the interfaces that are up and have a known rate, fastest first; bonds instead of their members."""
    folder = root / "sys/class/net"
    cards = []
    for path in _listed(folder):
        rate = _rate(folder, path.name, depth=3)
        if rate and read_text(path / "operstate") == "up" and not (path / "master").exists():
            cards.append(Card(path.name, rate, int(read_number(path / "mtu") or 0)))
    return sorted(cards, key=lambda card: -card.gbit_per_second)


def _rate(folder: Path, name: str, *, depth: int) -> float:
    """Return Gbit/s, for a bond or a VLAN those of its slowest member; 0 if unknown or without hardware.

    The rate that a virtual interface states, as in containers, has no meaning.
    """
    path = folder / name
    if (path / "device").exists():
        return max(0.0, (read_number(path / "speed") or 0) / 1000)
    below = [each.name.removeprefix("lower_") for each in _listed(path) if each.name.startswith("lower_")]
    # one connection uses one member of a bond
    rates = [_rate(folder, each, depth=depth - 1) for each in below] if depth else []
    return min(filter(None, rates), default=0.0)


def read_ports(root: Path = Path("/")) -> list[Port]:
    """List all RDMA ports, in any state."""
    return [
        Port(
            name=f"{path.parts[-3]}/{path.name}",
            state=_word(path / "state"),
            physical=_word(path / "phys_state"),
            gbit_per_second=max(0.0, read_number(path / "rate") or 0),
            link_layer=read_line(path / "link_layer"),
            has_routable_gid=_has_routable_gid(path),
        )
        for path in _ports(root)
    ]


def has_rdma_devices(root: Path = Path("/")) -> bool:
    """Return whether this process's /dev has devices of RDMA; a container may show the ports without them."""
    return any((root / "dev/infiniband").glob("uverbs*"))


def read_errors(root: Path = Path("/")) -> dict[str, float]:
    """Read the counters of all ports' errors, by port and counter."""
    return {
        f"{path.parts[-3]}/{path.name} {name}": count
        for path in _ports(root)
        for name in ERROR_COUNTERS
        if (count := read_number(path / "counters" / name)) is not None
    }


def usual_rate(ports: Sequence[Port]) -> float:
    """Return the most frequent rate of the ports, in Gbit/s."""
    return mode(sorted(port.gbit_per_second for port in ports))


def _ports(root: Path) -> list[Path]:
    return [port for device in _listed(root / "sys/class/infiniband") for port in _listed(device / "ports")]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _word(path: Path) -> str:
    """Read "4: ACTIVE" as ACTIVE."""
    return read_line(path).rpartition(":")[2].strip()


def _has_routable_gid(port: Path) -> bool:
    return any(
        read_text(kind) == "RoCE v2" and not NO_GID.match(read_text(port / "gids" / kind.name))
        for kind in _listed(port / "gid_attrs/types")
    )
