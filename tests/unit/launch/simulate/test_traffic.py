"""Messages between nodes, against the papers' counts."""

from types import SimpleNamespace

import pytest

from benchmarks.twin.traffic import node_traffic, stream_bytes
from bigbatch.comm.algorithms import ring, summed_by_library
from bigbatch.launch.simulate.network import LIBRARY_ALGORITHMS
from bigbatch.launch.simulate.traffic import SEGMENT_BYTES, Traffic, traffic_of_sum

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
DEALT_OUT = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize("groups", [PAIRS, DEALT_OUT])
def test_ring_enters_and_leaves_each_node_once_with_its_2_of_p_minus_1_over_p(groups):
    counted = node_traffic("ring", 800, element_bytes=4, groups=groups, segment_bytes=1000)
    # 2 (P - 1) / P of 3,200 bytes in 2 (P - 1) messages, to the next node alone
    assert counted == {(node, (node + 1) % 4): Traffic(5600, 14) for node in range(4)}
    assert stream_bytes(counted[0, 1]) == 5600 + 14 * 8


def test_long_parts_travel_in_segments():
    # parts of 800 bytes in three segments of at most 300
    counted = node_traffic("hierarchical", 800, element_bytes=4, groups=PAIRS, segment_bytes=300)
    assert counted[0, 1] == Traffic(4800, 18)


def test_what_does_not_divide_is_counted_to_the_element():
    # parts of 4, 3 and 3 elements: a place sends all of them twice, but for the two that its last hops would bring
    counted = node_traffic("ring", 10, element_bytes=4, groups=((0,), (1,), (2,)), segment_bytes=1000)
    assert {way: each.payload_bytes // 4 for way, each in counted.items()} == {(0, 1): 14, (1, 2): 13, (2, 0): 13}


def test_doubling_sends_all_bytes_log2_of_m_times():
    counted = node_traffic("doubling", 100, element_bytes=4, groups=PAIRS, segment_bytes=1000)
    assert counted == {(a, a ^ bit): Traffic(400, 1) for a in range(4) for bit in (1, 2)}
    odd = node_traffic("doubling", 100, element_bytes=4, groups=((0,), (1,), (2,)), segment_bytes=1000)
    assert odd == {way: Traffic(400, 1) for way in ((0, 1), (1, 0), (2, 0), (0, 2))}


def test_one_node_sends_nothing_and_other_algorithms_are_refused():
    for algorithm in ("ring", "hierarchical", "sharded", "doubling"):
        assert node_traffic(algorithm, 800, element_bytes=4, groups=((0, 1),), segment_bytes=1000) == {}
    with pytest.raises(ValueError, match="native"):
        node_traffic("native", 800, element_bytes=4, groups=PAIRS, segment_bytes=1000)


# --- the first rank and its node, without a list of hops ---


def test_facts_of_algorithms_are_those_of_comm():
    assert SEGMENT_BYTES == ring.SEGMENT_BYTES
    assert summed_by_library(SimpleNamespace(name="nccl")) == set(LIBRARY_ALGORITHMS)


def test_first_rank_and_node_send_the_papers_counts():
    """M = 3,200 bytes on 4 nodes of 2: 2(n-1)/n of it in 2(n-1) messages around a ring of n."""

    def sent(algorithm):
        return traffic_of_sum(algorithm, 800, element_bytes=4, num_nodes=4, node_size=2, segment_bytes=1000)

    around_8 = Traffic(2 * 7 * 3200 // 8, 14)
    assert sent("ring") == (around_8, around_8)
    # 4(k-1) hops of M/k inside, the leaders' ring across
    assert sent("hierarchical") == (Traffic(4 * 1600 + 4800, 4 + 6), Traffic(4800, 6))
    # 2(k-1) hops of M/k inside, and one of k rings of M/k across
    assert sent("sharded") == (Traffic(2 * 1600 + 2400, 2 + 6), Traffic(4800, 12))
    # all of it in log2(4) hops, and once to the other rank of the node
    assert sent("doubling") == (Traffic(3 * 3200, 3), Traffic(2 * 3200, 2))


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "sharded", "doubling"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3, 2), (4, 3), (5, 1)])
def test_first_node_sends_what_the_list_of_hops_has(algorithm, shape):
    num_nodes, node_size = shape
    groups = [range(node * node_size, (node + 1) * node_size) for node in range(num_nodes)]
    for num_elements in (0, 1, 10, 101, 1000):
        listed = node_traffic(algorithm, num_elements, element_bytes=4, groups=groups, segment_bytes=300)
        expected = sum((each for way, each in listed.items() if way[0] == 0), Traffic())
        sizes = {"num_nodes": num_nodes, "node_size": node_size, "segment_bytes": 300}
        assert traffic_of_sum(algorithm, num_elements, element_bytes=4, **sizes)[1] == expected


def test_first_sends_of_a_library_are_not_known():
    with pytest.raises(ValueError, match="native"):
        traffic_of_sum("native", 10, element_bytes=4, num_nodes=2, node_size=1, segment_bytes=1000)
