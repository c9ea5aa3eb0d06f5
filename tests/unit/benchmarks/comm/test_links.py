"""What links could send: the least exposed communication."""

import pytest

from benchmarks.comm import links


def test_links_least_exposed_in_closed_form() -> None:
    # at 0.1 all gradients: 1 MB at 1 MB/s, 1.5 times for 4 nodes; backward ends at 1.1: bytes - (end - first)
    found = links.least_exposed_seconds([0.1, 1.1], [1_000_000, 0], num_nodes=4, goodput=8e6)
    assert found == pytest.approx(1.5 - (1.1 - 0.1))
    # what backward hides completely is not negative
    assert links.least_exposed_seconds([0.1, 9.0], [1_000_000, 0], num_nodes=4, goodput=8e6) == 0
