"""Messages between nodes, against the papers' counts."""

import pytest

from bigbatch.comm.tuning.traffic import Traffic, node_traffic

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
DEALT_OUT = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize("groups", [PAIRS, DEALT_OUT])
def test_ring_enters_and_leaves_each_node_once_with_its_2_of_p_minus_1_over_p(groups):
    counted = node_traffic("ring", 800, element_bytes=4, groups=groups, segment_bytes=1000)
    # 2 (P - 1) / P of 3,200 bytes in 2 (P - 1) messages, to the next node alone
    assert counted == {(node, (node + 1) % 4): Traffic(5600, 14) for node in range(4)}
    assert counted[0, 1].stream_bytes == 5600 + 14 * 8


def test_leaders_ring_and_shards_rings_carry_the_same_bytes():
    by_leaders = node_traffic("hierarchical", 800, element_bytes=4, groups=PAIRS, segment_bytes=1000)
    assert by_leaders == {(node, (node + 1) % 4): Traffic(4800, 6) for node in range(4)}
    by_shards = node_traffic("sharded", 800, element_bytes=4, groups=PAIRS, segment_bytes=1000)
    assert by_shards == {(node, (node + 1) % 4): Traffic(4800, 12) for node in range(4)}


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
