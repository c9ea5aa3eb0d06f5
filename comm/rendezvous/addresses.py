"""Under which address the other ranks can reach this one."""

import fcntl
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from bigbatch.errors import CommError

SIOCGIFADDR = 0x8915
"""Linux: ask for an interface's IPv4 address (netdevice(7))."""


def family_of(address: str) -> socket.AddressFamily:
    """Tell IPv6 from IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def loopback() -> str:
    """Return this host's own address for itself: IPv4, or IPv6 on a host without IPv4."""
    with suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1"
    return "::1"


def own_address(*, is_one_host: bool, interface: str | None = None, towards: str | None = None) -> str:
    """Find this host's address: of the named interface, or of that which leads to host `towards` or to its name.

    IPv4 where there is one, else IPv6. Of several interfaces, with commas between, it is the first's: what we send
    ourselves goes by one alone. Loopback where all ranks run on one host.
    Raises: CommError for an interface that does not exist, a name that others cannot reach, or a host `towards` that
    this one cannot reach.
    """
    if interface is not None:
        return interface_address(interface.partition(",")[0])
    if is_one_host:
        return loopback()
    if towards is not None:
        address = _start_of_route(towards)
        if not ip_address(address).is_loopback:
            return address
    return _address_of_name()


def _start_of_route(towards: str) -> str:
    reason: OSError | None = None
    for where in addresses_of(towards):
        with socket.socket(family_of(where), socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((where, 9))  # sends nothing: only asks for the route
            except OSError as error:
                reason = reason or error
            else:
                return str(probe.getsockname()[0])
    raise CommError(
        f"{socket.gethostname()} knows no way to {towards}, where the ranks meet ({reason or 'no such host'}): set "
        "MASTER_ADDR to an address or name that all nodes reach, or comm.interface to the network interface that they "
        "share"
    ) from reason


def addresses_of(host: str) -> list[str]:
    """Look up a name; IPv4 first, none where there is no such host."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return sorted({str(where[0]) for *_, where in found}, key=lambda address: (":" in address, address))
    return []


def _address_of_name() -> str:
    host = socket.gethostname()
    remedy = "mend /etc/hosts, set comm.interface, or set MASTER_ADDR and MASTER_PORT for all ranks"
    addresses = addresses_of(host)
    if not addresses:
        raise CommError(f"host name {host} does not resolve: {remedy}")
    for address in addresses:
        if not (ip_address(address).is_loopback or ip_address(address).is_link_local):
            return address
    raise CommError(f"host name {host} resolves to {addresses[0]}, which other nodes cannot reach: {remedy}")


def interface_address(interface: str) -> str:
    """Look up the address of a network interface: IPv4 where it has one, else IPv6. Linux.

    Raises: CommError where there is none of that name, or it has no address; the message lists those there are.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise CommError(
            f"interface {interface!r}: {socket.gethostname()} has no such network interface; it has "
            f"{', '.join(names)}: name one of them by --interface, or comm.interface"
        )
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError as error:
            if address := _ipv6_address(interface):
                return address
            raise CommError(
                f"interface {interface!r} of {socket.gethostname()} has no address ({error.strerror})"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """Find the network interface that has an address; None where it is nobody's first one."""
    for _, name in socket.if_nameindex():
        with suppress(CommError):
            if interface_address(name) == address:
                return name
    return None


def _ipv6_address(interface: str) -> str:
    """Return an address of the interface that is valid beyond its link, as /proc/net/if_inet6 has it; "" for none."""
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ip_address(bytes.fromhex(digits))
            if name == interface and not address.is_link_local:
                return str(address)
    return ""
