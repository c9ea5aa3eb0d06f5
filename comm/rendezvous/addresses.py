"""Find the address at which the other ranks can reach this host."""

import socket
from contextlib import suppress
from ipaddress import ip_address

from bigbatch.errors import CommError


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family: IPv6 for an address with a colon, else IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def loopback() -> str:
    """Return the loopback address: IPv4, or IPv6 on a host without IPv4."""
    with suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1"
    return "::1"


def own_address(*, is_one_host: bool, interface: str | None = None, towards: str | None = None) -> str:
    """Return this host's address: of the named interface, of the route to host `towards`, or of its host name.

    IPv4 if there is one, else IPv6. interface: one name, or several with commas between; bigbatch's own transport uses
    the first. Loopback if all ranks run on one host.
    Raises: CommError if the interface does not exist, other hosts cannot reach the address of the host name, or there
    is no route to `towards`.
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
        f"{socket.gethostname()} has no route to {towards}, where the ranks meet ({reason or 'no such host'}): set "
        "MASTER_ADDR to an address or name that all nodes reach, or comm.interface to the network interface that they "
        "share"
    ) from reason


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host name, IPv4 first; an empty list if the name is unknown."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return sorted({str(where[0]) for *_, where in found}, key=lambda address: (":" in address, address))
    return []


def _address_of_name() -> str:
    host = socket.gethostname()
    remedy = "fix /etc/hosts, set comm.interface, or set MASTER_ADDR and MASTER_PORT for all ranks"
    addresses = addresses_of(host)
    if not addresses:
        raise CommError(f"host name {host} does not resolve: {remedy}")
    for address in addresses:
        if not (ip_address(address).is_loopback or ip_address(address).is_link_local):
            return address
    raise CommError(f"host name {host} resolves to {addresses[0]}, which other nodes cannot reach: {remedy}")


def interface_address(interface: str) -> str:
    """Return the address of a network interface: IPv4 if it has one, else an IPv6 address that is not link-local.

    Raises: CommError if the interface does not exist (the message lists the existing ones) or has no address.
    """
    import psutil  # late: commands that start jobs import this file and must start fast

    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise CommError(
            f"interface {interface!r}: {socket.gethostname()} has no such network interface; it has "
            f"{', '.join(names)}: name one of them by --interface, or comm.interface"
        )
    found = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in found:
            if each.family == family and not (family == socket.AF_INET6 and ip_address(each.address).is_link_local):
                return str(each.address)
    raise CommError(f"interface {interface!r} of {socket.gethostname()} has no address")


def interface_of(address: str) -> str | None:
    """Return the network interface whose first address this is, or None."""
    for _, name in socket.if_nameindex():
        with suppress(CommError):
            if interface_address(name) == address:
                return name
    return None
