"""What links send and could send: counters, iperf3, the least exposed communication."""

import pytest

from benchmarks.comm import links


def test_links_limit() -> None:
    # 4 nodes: 1.5 times the bytes; 100 MB at 800 Mbit/s = 100 MB/s
    assert links.limit_seconds(100e6, num_nodes=4, goodput=800e6) == pytest.approx(1.5)


def test_links_least_exposed_in_closed_form() -> None:
    # one node's worth of gradients at 0.1, backward ends at 1.1 with next to nothing: bytes - (end - first)
    found = links.least_exposed_seconds([0.1, 1.1], [1_000_000, 0], num_nodes=4, goodput=8e6)
    assert found == pytest.approx(1.5 - (1.1 - 0.1))
    # what backward hides completely is not negative
    assert links.least_exposed_seconds([0.1, 9.0], [1_000_000, 0], num_nodes=4, goodput=8e6) == 0
