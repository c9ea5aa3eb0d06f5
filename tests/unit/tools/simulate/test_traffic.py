"""Messages between nodes, against the papers' counts."""

from types import SimpleNamespace

import pytest

from benchmarks.twin.traffic import node_traffic
from bigbatch.comm.algorithms import ring
from bigbatch.comm.algorithms.by_name import summed_by_library
from bigbatch.tools.simulate import traffic
from bigbatch.tools.simulate.network import LIBRARY_ALGORITHMS
from bigbatch.tools.simulate.traffic import SEGMENT_BYTES, Traffic, traffic_of_sum

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))


def test_what_does_not_divide_is_counted_to_the_element():
    # parts of 4, 3 and 3 elements: a place sends all of them twice, but for the two that its last hops would bring
    counted = node_traffic("ring", 10, element_bytes=4, groups=((0,), (1,), (2,)), segment_bytes=1000)
    assert {way: each.payload_bytes // 4 for way, each in counted.items()} == {(0, 1): 14, (1, 2): 13, (2, 0): 13}


def test_one_node_sends_nothing_and_other_algorithms_are_refused():
    for algorithm in ("ring", "hierarchical", "sharded", "doubling"):
        assert node_traffic(algorithm, 800, element_bytes=4, groups=((0, 1),), segment_bytes=1000) == {}
    with pytest.raises(ValueError, match="native"):
        node_traffic("native", 800, element_bytes=4, groups=PAIRS, segment_bytes=1000)


# --- the first rank and its node, without a list of hops ---


def test_facts_of_algorithms_are_those_of_comm():
    assert SEGMENT_BYTES == ring.SEGMENT_BYTES
    assert summed_by_library(SimpleNamespace(name="nccl")) == set(LIBRARY_ALGORITHMS)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "sharded", "doubling"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3, 2), (4, 3), (5, 1)])
def test_first_node_sends_what_the_list_of_hops_has(algorithm, shape, monkeypatch):
    monkeypatch.setattr(traffic, "SEGMENT_BYTES", 300)
    num_nodes, node_size = shape
    groups = [range(node * node_size, (node + 1) * node_size) for node in range(num_nodes)]
    for num_elements in (0, 1, 10, 101, 1000):
        listed = node_traffic(algorithm, num_elements, element_bytes=4, groups=groups, segment_bytes=300)
        expected = sum((each for way, each in listed.items() if way[0] == 0), Traffic())
        sizes = {"num_nodes": num_nodes, "node_size": node_size}
        assert traffic_of_sum(algorithm, num_elements, element_bytes=4, **sizes)[1] == expected


def test_first_sends_of_a_library_are_not_known():
    with pytest.raises(ValueError, match="native"):
        traffic_of_sum("native", 10, element_bytes=4, num_nodes=2, node_size=1)
