"""Checks of a host's network and of the limits that it depends on. Pure."""

from collections.abc import Iterator

from bigbatch.trainer.machine.network import Port, usual_rate
from bigbatch.trainer.preflight.check import Check, Host

LEAST_LOCKED_BYTES = 1 << 30
"""NCCL's buffers: 4 MiB of a channel and peer, up to 32 channels, for sending and receiving, of a few peers."""
RDMA_SHARE = SOCKET_SHARE = 0.5
"""Least share of a link's rate, each way: far below what it reaches, and above what it falls back to."""
MOST_SOCKET_GBIT = 1.5
"""Least Gbit/s of one TCP connection on a card of any speed: more than a card of 1 Gbit/s carries, and less than a busy
core moves each way at once (2.0 between two emulated nodes on 2 cores at a load of 6); clouds limit one to 5."""


def _no_port(host: Host) -> Iterator[str]:
    if host.on_gpus and host.crosses_nodes and host.ports and not host.usable_ports:
        states = ", ".join(f"{port.name} {_state(port)}" for port in host.ports)
        yield f"no InfiniBand or RoCE port carries data ({states}): gradients go by TCP"


def _idle_ports(host: Host) -> Iterator[str]:
    for port in host.ports if host.on_gpus and host.usable_ports else ():
        if not port.is_usable:
            yield f"{port.name} is {_state(port)}"


def _state(port: Port) -> str:
    return f"{port.state or 'of unknown state'} ({port.physical or 'unknown'})"


def _slow_ports(host: Host) -> Iterator[str]:
    for port in host.usable_ports if host.on_gpus else ():
        usual = usual_rate([other for other in host.usable_ports if other.link_layer == port.link_layer])
        if port.gbit_per_second < usual:
            yield f"{port.name} runs at {port.gbit_per_second:g} Gbit/s, most {port.link_layer} ports at {usual:g}"


def _gids(host: Host) -> Iterator[str]:
    for port in host.ports if host.on_gpus and host.usable_ports else ():
        if port.is_usable and port.link_layer == "Ethernet" and not port.has_routable_gid:
            yield f"{port.name} has no RoCE v2 address"


def _errors(host: Host) -> Iterator[str]:
    for name, count in host.errors_after.items():
        if (risen := count - host.errors.get(name, count)) > 0:
            yield f"{name} rose by {risen:,.0f} while links were measured"


def _gpudirect(host: Host) -> Iterator[str]:
    kinds = {port.link_layer for port in host.usable_ports}
    if host.on_gpus and host.crosses_nodes and kinds & {"InfiniBand", "Ethernet"} and not host.has_gpudirect:
        yield "neither nvidia_peermem is loaded nor dmabuf possible, so gradients go by host memory"


def _locked_memory(host: Host) -> Iterator[str]:
    is_registered = host.on_gpus and host.crosses_nodes and host.usable_ports
    if is_registered and host.limits.locked_bytes < LEAST_LOCKED_BYTES:
        yield f"a rank may lock {host.limits.locked_bytes / 1024:,.0f} KiB, below {LEAST_LOCKED_BYTES >> 10:,}"


def _bandwidth(host: Host) -> Iterator[str]:
    expected = _expected_gbit(host)
    measured = host.link_gbit_per_second
    if expected and measured is not None and measured < expected[0]:
        yield f"its best link carries {measured:.2f} Gbit/s, below {expected[0]:g}: {expected[1]}"


def _expected_gbit(host: Host) -> tuple[float, str] | None:
    """Return the least Gbit/s to expect of the link that the job should use, and its rate in words; None if unknown.

    That link is RDMA between GPUs, else the stated interface, or the fastest card.
    """
    if host.on_gpus and host.usable_ports:
        rate = usual_rate(host.usable_ports)
        return RDMA_SHARE * rate, f"its {len(host.usable_ports)} RDMA ports have {rate:g}"
    names = (host.interface,) if host.is_interface_stated else [card.name for card in host.cards[:1]]
    for card in host.cards:
        if card.name in names:
            used = f", and ranks go by {host.interface}" if host.interface not in (None, card.name) else ""
            least = min(SOCKET_SHARE * card.gbit_per_second, MOST_SOCKET_GBIT)
            return least, f"{card.name} has {card.gbit_per_second:g}{used}"
    return None


NETWORK_CHECKS = (
    Check(
        "RDMA ports",
        "InfiniBand and RoCE ports, for GPUs of several nodes",
        "there are some, and none that is ACTIVE, with a RoCE v2 address on Ethernet",
        "look at cable, subnet manager and addresses (ibstat, show_gids)",
        _no_port,
    ),
    Check(
        "idle ports",
        "each of these ports, beside usable ones",
        "not ACTIVE",
        "look at its cable, unless it is meant to be free",
        _idle_ports,
        is_finding=False,
    ),
    Check(
        "port rates",
        "rates of these ports",
        "below what most ports of the same kind have",
        "look at cable and switch port, unless it is for storage",
        _slow_ports,
        is_finding=False,
    ),
    Check(
        "GIDs",
        "addresses (GIDs) of RoCE ports, beside usable ones",
        "none of RoCE v2",
        "give its interface an IP address",
        _gids,
        is_finding=False,
    ),
    Check(
        "port errors",
        "errors that these ports count",
        "more after measuring links than before",
        "look at its cable",
        _errors,
        is_finding=False,
    ),
    Check(
        "GPUDirect",
        "`nvidia_peermem`; Linux 5.12 with the driver's open modules (dmabuf)",
        "neither, where GPUs of several nodes have such ports",
        "have nvidia_peermem loaded (modprobe nvidia-peermem)",
        _gpudirect,
        is_finding=False,
    ),
    Check(
        "locked memory",
        "memory that a rank may lock, where GPUs of several nodes have such ports: NCCL registers its buffers",
        f"below {LEAST_LOCKED_BYTES >> 30} GiB; links are not measured then",
        "have it unlimited (ulimit -l; LimitMEMLOCK=infinity of slurmd; --ulimit memlock=-1)",
        _locked_memory,
        breaks_links=True,
    ),
    Check(
        "bandwidth",
        "each node's best link beside these ports' rate; without them that of `--interface`, else of the fastest card",
        f"below {RDMA_SHARE:g} of it; by TCP below {SOCKET_SHARE:g} and below {MOST_SOCKET_GBIT:g} Gbit/s",
        "name the card by --interface; between GPUs --env NCCL_DEBUG=INFO must show NET/IB; look at cable and switch",
        _bandwidth,
    ),
)
