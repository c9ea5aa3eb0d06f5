"""Under which address the other ranks can reach this one."""

import fcntl
import socket
import struct

from bigbatch.errors import CommError

SIOCGIFADDR = 0x8915
"""Linux: ask for an interface's IPv4 address (netdevice(7))."""


def own_address(*, is_one_host: bool, interface: str | None = None, towards: str | None = None) -> str:
    """Find this host's IPv4 address: of the named interface, or of that which leads to host `towards` or to its name.

    Loopback where all ranks run on one host.
    Raises: CommError for an interface that does not exist, a name that others cannot reach, or a host `towards` that
    this one cannot reach by IPv4.
    """
    if interface is not None:
        return interface_address(interface)
    if is_one_host:
        return "127.0.0.1"
    if towards is not None:
        address = _start_of_route(towards)
        if not address.startswith("127."):
            return address
    return _address_of_name()


def _start_of_route(towards: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing: only asks for the route
        except OSError as error:
            raise CommError(
                f"{socket.gethostname()} knows no way by IPv4 to {towards}, where the ranks meet ({error}): set "
                "MASTER_ADDR to an IPv4 address or a name of one, or comm.interface to the network interface that all "
                "nodes share"
            ) from error
        return str(probe.getsockname()[0])


def _address_of_name() -> str:
    host = socket.gethostname()
    remedy = "mend /etc/hosts, set comm.interface, or set MASTER_ADDR and MASTER_PORT for all ranks"
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise CommError(f"host name {host} does not resolve ({error}): {remedy}") from error
    if address.startswith("127."):
        raise CommError(f"host name {host} resolves to {address}, which other nodes cannot reach: {remedy}")
    return address


def interface_address(interface: str) -> str:
    """Look up the IPv4 address of a network interface. Linux.

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
            raise CommError(
                f"interface {interface!r} of {socket.gethostname()} has no IPv4 address ({error.strerror})"
            ) from error
    return socket.inet_ntoa(answer[20:24])
