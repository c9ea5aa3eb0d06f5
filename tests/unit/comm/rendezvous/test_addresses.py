"""Under which address a rank can be reached."""

import socket

import pytest

from bigbatch.comm.rendezvous.addresses import interface_address, own_address
from bigbatch.errors import CommError


def test_loopback_is_kept_to_by_one_host() -> None:
    assert own_address(is_one_host=True) == "127.0.0.1"


def test_loopback_interface_by_name() -> None:
    assert own_address(is_one_host=False, interface="lo") == "127.0.0.1"
    assert own_address(is_one_host=True, interface="lo", towards="192.0.2.1") == "127.0.0.1"


def test_interface_that_does_not_exist_names_those_there_are() -> None:
    with pytest.raises(
        CommError, match=r"^interface 'ib7': \S+ has no such network interface; it has .*\blo\b.*: name"
    ):
        own_address(is_one_host=False, interface="ib7")


def test_interface_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "unplugged0")])
    with pytest.raises(CommError, match=r"interface 'unplugged0' of \S+ has no IPv4 address \(.+\)"):
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


def test_route_within_the_host_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", FakeRoute("127.0.0.1"))  # rank 0 itself
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.8")
    assert own_address(is_one_host=False, towards="node0") == "10.0.0.8"


@pytest.mark.parametrize("towards", ["::1", "2001:db8::7"])
def test_meeting_point_without_ipv4_is_named(towards: str) -> None:
    expected = (
        rf"\S+ knows no way by IPv4 to {towards}, where the ranks meet \(.+\): set MASTER_ADDR .* or comm.interface"
    )
    with pytest.raises(CommError, match=expected):
        own_address(is_one_host=False, towards=towards)


@pytest.mark.parametrize(
    ("resolves_to", "message"),
    [("127.0.1.1", "resolves to 127.0.1.1, which other nodes cannot reach"), (None, r"does not resolve \(Name or")],
)
def test_host_name_that_leads_nowhere_is_named(
    resolves_to: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(_: str) -> str:
        if resolves_to is None:
            raise socket.gaierror("Name or service not known")
        return resolves_to

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    with pytest.raises(CommError, match=f"{message}.*: mend /etc/hosts, set comm.interface, or set MASTER_ADDR"):
        own_address(is_one_host=False)
