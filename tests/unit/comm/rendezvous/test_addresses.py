"""Under which address a rank can be reached."""

import socket

import pytest
from error_texts import naming

from bigbatch.comm.rendezvous.addresses import interface_address, own_address
from bigbatch.errors import CommError


def test_own_address_of_one_host_is_loopback() -> None:
    assert own_address(is_one_host=True) == "127.0.0.1"


def test_interface_named_may_be_loopback() -> None:
    assert own_address(is_one_host=False, interface="lo") == "127.0.0.1"
    assert own_address(is_one_host=True, interface="lo", towards="192.0.2.1") == "127.0.0.1"


def test_interface_that_does_not_exist_names_those_there_are() -> None:
    with pytest.raises(CommError, match=r"'ib7': \S+ .*\blo\b.* --interface.*comm\.interface"):
        own_address(is_one_host=False, interface="ib7")


def test_interface_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "unplugged0")])
    with pytest.raises(CommError, match=r"'unplugged0' of \S+ .*IPv4.* \(.+\)"):
        interface_address("unplugged0")


class FakeRoute:
    """A datagram socket whose route starts at a given address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __call__(self, *_: object) -> "FakeRoute":
        return self

    def __enter__(self) -> "FakeRoute":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def connect(self, where: tuple[str, int]) -> None:
        """Asks for the route."""
        assert where[0] == "node0"

    def getsockname(self) -> tuple[str, int]:
        """Where it starts."""
        return self._address, 1


def test_interface_that_leads_to_the_meeting_point_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", FakeRoute("10.0.0.7"))
    assert own_address(is_one_host=False, towards="node0") == "10.0.0.7"


def test_own_address_is_no_route_within_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", FakeRoute("127.0.0.1"))  # rank 0 itself
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.8")
    assert own_address(is_one_host=False, towards="node0") == "10.0.0.8"


@pytest.mark.parametrize("towards", ["::1", "2001:db8::7"])
def test_own_address_towards_a_meeting_point_without_ipv4_names_it(towards: str) -> None:
    with pytest.raises(CommError, match=naming(socket.gethostname(), "IPv4", towards, "MASTER_ADDR", "comm.interface")):
        own_address(is_one_host=False, towards=towards)


@pytest.mark.parametrize(
    ("resolves_to", "cause"),
    [("127.0.1.1", "127.0.1.1"), (None, "(Name or service not known)")],
)
def test_own_address_names_a_host_name_that_leads_nowhere(
    resolves_to: str | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(_: str) -> str:
        if resolves_to is None:
            raise socket.gaierror("Name or service not known")
        return resolves_to

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    named = naming(socket.gethostname(), cause, "/etc/hosts", "comm.interface", "MASTER_ADDR")
    with pytest.raises(CommError, match=named):
        own_address(is_one_host=False)
