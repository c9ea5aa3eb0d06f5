"""What links send and could send: counters, iperf3, the least exposed communication."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from error_texts import naming

from benchmarks.comm import (
    links,
)
from bigbatch.errors import CommError


def test_links_sent_bytes_leave_out_loopback() -> None:
    text = (
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
        "    lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n"
        "  eth0: 5 1 0 0 0 0 0 0 700 1 0 0 0 0 0 0\n"
        "  eth1:6 1 0 0 0 0 0 0 80 1 0 0 0 0 0 0\n"
    )
    assert links.parse_sent_bytes(text) == 780
    assert links.parse_sent_bytes(text, interface="eth1") == 80
    with pytest.raises(CommError, match=naming("--interface eth7", "eth0, eth1")):
        links.parse_sent_bytes(text, interface="eth7")


def test_links_limit() -> None:
    # 4 nodes: 1.5 times the bytes; 100 MB at 800 Mbit/s = 100 MB/s
    assert links.limit_seconds(100e6, num_nodes=4, goodput=800e6) == pytest.approx(1.5)


def test_iperf3_report() -> None:
    assert links.parse_iperf3('{"end": {"sum_received": {"bits_per_second": 191e6}}}') == 191e6
    with pytest.raises(ValueError, match=r"^unable to connect to server: Connection refused$"):
        links.parse_iperf3('{"end": {}, "error": "unable to connect to server: Connection refused"}')
    with pytest.raises(ValueError, match=naming("iperf3", "sum")):
        links.parse_iperf3("{}")


class TwoNodes:
    """A job of two ranks on two nodes as the first sees it; the second says the same."""

    rank, num_nodes, interface = 0, 2, None
    communicator = SimpleNamespace(topology=SimpleNamespace(leaders=(0, 1)))

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def test_goodput_given_is_not_measured_and_the_highest_counts() -> None:
    assert links.find_goodput(None, 956.0, seconds=9) == 956e6  # type: ignore[arg-type]
    assert links.best_goodput([None, 955e6, 956e6]) == 956e6
    assert links.best_goodput([None, None]) is None


def test_iperf3_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(links, "own_address", lambda **_: "127.0.0.1")
    assert links._run_client("127.0.0.1", 9, seconds=1, control=None) == (
        None,
        "[Errno 2] No such file or directory: 'iperf3'",
    )
    with pytest.raises(CommError, match=naming("'iperf3'", "apt-get install", "--goodput-mbit")):
        links.measure_goodput(TwoNodes(), seconds=1, control=None)  # type: ignore[arg-type]


def test_links_least_exposed_is_the_best_of_all_orders() -> None:
    """Brute force: send each gradient whole, as soon as it is ready and the link free, in every order."""
    ready, num_bytes = [0.9, 0.2, 0.5, 1.0], [10, 400, 300, 200]
    seconds = [links.limit_seconds(n, num_nodes=2, goodput=8000) for n in num_bytes]  # 1 ms per byte

    def end(order: Sequence[int]) -> float:
        free = 0.0
        for i in order:
            free = max(free, ready[i]) + seconds[i]
        return free

    best = min(end(order) for order in itertools.permutations(range(4)))
    found = links.least_exposed_seconds(ready, num_bytes, num_nodes=2, goodput=8000)
    assert found == pytest.approx(best - max(ready))


def test_links_least_exposed_in_closed_form() -> None:
    # one node's worth of gradients at 0.1, backward ends at 1.1 with next to nothing: bytes - (end - first)
    found = links.least_exposed_seconds([0.1, 1.1], [1_000_000, 0], num_nodes=4, goodput=8e6)
    assert found == pytest.approx(1.5 - (1.1 - 0.1))
    # what backward hides completely is not negative
    assert links.least_exposed_seconds([0.1, 9.0], [1_000_000, 0], num_nodes=4, goodput=8e6) == 0
