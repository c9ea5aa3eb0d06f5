"""Under which address a rank can be reached."""

import errno
import socket
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from error_texts import naming

from bigbatch.comm.rendezvous.addresses import interface_address, own_address
from bigbatch.errors import CommError


def test_own_address_of_one_host_is_loopback() -> None:
    assert own_address(is_one_host=True) == "127.0.0.1"


def test_own_address_of_one_host_without_ipv4_is_its_other_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self: socket.socket, address: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", bind)
    assert own_address(is_one_host=True) == "::1"


def test_interface_named_may_be_loopback() -> None:
    assert own_address(is_one_host=False, interface="lo") == "127.0.0.1"
    assert own_address(is_one_host=True, interface="lo", towards="192.0.2.1") == "127.0.0.1"
    assert own_address(is_one_host=False, interface="lo,ib7") == "127.0.0.1", "the first of several"


def test_interface_that_does_not_exist_names_those_there_are() -> None:
    with pytest.raises(CommError, match=r"'ib7': \S+ .*\blo\b.* --interface.*comm\.interface"):
        own_address(is_one_host=False, interface="ib7")


def test_interface_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "unplugged0")])
    with pytest.raises(CommError, match=r"'unplugged0' of \S+ has no address"):
        interface_address("unplugged0")


def finding(**known: str) -> Callable[..., list[tuple[object, ...]]]:
    """A name service that knows these hosts."""

    def look_up(host: str, port: object, **options: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    return look_up


def route(start: str, *, to: str = "10.9.9.9", error: OSError | None = None) -> Callable[..., object]:
    """Make datagram sockets whose route starts at an address, or fails."""

    def connect(where: tuple[str, int]) -> None:
        if error:
            raise error
        assert where[0] == to

    probe = SimpleNamespace(connect=connect, getsockname=lambda: (start, 1))
    return lambda *_: nullcontext(probe)


def test_interface_that_leads_to_the_meeting_point_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", finding(node0="10.9.9.9"))
    monkeypatch.setattr(socket, "socket", route("10.0.0.7"))
    assert own_address(is_one_host=False, towards="node0") == "10.0.0.7"


def test_own_address_is_no_route_within_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", route("127.0.0.1"))  # rank 0 itself
    monkeypatch.setattr(socket, "getaddrinfo", finding(node0="10.9.9.9", **{socket.gethostname(): "10.0.0.8"}))
    assert own_address(is_one_host=False, towards="node0") == "10.0.0.8"


@pytest.mark.parametrize("towards", ["2001:db8::7", "no.such.host.example"])
def test_own_address_towards_a_meeting_point_out_of_reach_names_it(
    towards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", finding(**{"2001:db8::7": "2001:db8::7"}))
    monkeypatch.setattr(socket, "socket", route("", error=OSError(101, "Network is unreachable")))
    with pytest.raises(CommError, match=naming(socket.gethostname(), towards, "MASTER_ADDR", "comm.interface")):
        own_address(is_one_host=False, towards=towards)


def test_own_address_is_ipv6_where_the_meeting_point_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", finding(node0="2001:db8::7"))
    families: list[object] = []
    make = route("2001:db8::8", to="2001:db8::7")
    monkeypatch.setattr(socket, "socket", lambda family, kind: families.append(family) or make())
    assert own_address(is_one_host=False, towards="node0") == "2001:db8::8"
    assert families == [socket.AF_INET6]


@pytest.mark.parametrize(
    ("resolves_to", "cause"),
    [("127.0.1.1", "127.0.1.1"), (None, "does not resolve")],
)
def test_own_address_names_a_host_name_that_leads_nowhere(
    resolves_to: str | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {} if resolves_to is None else {socket.gethostname(): resolves_to}
    monkeypatch.setattr(socket, "getaddrinfo", finding(**known))
    named = naming(socket.gethostname(), cause, "/etc/hosts", "comm.interface", "MASTER_ADDR")
    with pytest.raises(CommError, match=named):
        own_address(is_one_host=False)
