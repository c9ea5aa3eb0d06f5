"""Which rank sits where."""

import pytest
from error_texts import naming

from bigbatch.comm.rendezvous.topology import Topology, make_topology

NODE_MAJOR = ("a", "a", "a", "a", "b", "b", "b", "b")
CYCLIC = ("a", "b", "a", "b", "a", "b", "a", "b")
UNEVEN = ("a", "a", "a", "b", "b")


@pytest.mark.parametrize(
    ("hosts", "group_size", "groups"),
    [
        (("a",), None, ((0,),)),
        (NODE_MAJOR, None, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (CYCLIC, None, ((0, 2, 4, 6), (1, 3, 5, 7))),
        (UNEVEN, None, ((0, 1, 2), (3, 4))),
        (NODE_MAJOR, 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (CYCLIC, 2, ((0, 2), (4, 6), (1, 3), (5, 7))),  # the parts of a host stand side by side
        (UNEVEN, 2, ((0, 1), (2,), (3, 4))),
        (NODE_MAJOR, 1, tuple((rank,) for rank in range(8))),
        (NODE_MAJOR, 16, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (("b", "a", "b"), None, ((0, 2), (1,))),  # by first rank, not by name
    ],
)
def test_groups(hosts: tuple[str, ...], group_size: int | None, groups: tuple[tuple[int, ...], ...]) -> None:
    assert make_topology(hosts, rank=0, group_size=group_size).groups == groups


def test_topology_of_one_ranks_view() -> None:
    topology = make_topology(CYCLIC, rank=5, group_size=2)
    assert topology == Topology(rank=5, groups=((0, 2), (4, 6), (1, 3), (5, 7)))
    assert (topology.world_size, topology.num_nodes, topology.node_rank) == (8, 4, 3)
    assert topology.node == (5, 7)
    assert topology.leaders == (0, 4, 1, 5)
    assert (topology.smallest_node, make_topology(UNEVEN, rank=0, group_size=2).smallest_node) == (2, 1)


@pytest.mark.parametrize("group_size", [None, 1, 2, 3])
@pytest.mark.parametrize("hosts", [NODE_MAJOR, CYCLIC, UNEVEN, ("c", "a", "b", "c", "a", "c")])
def test_ring_enters_each_host_once(hosts: tuple[str, ...], group_size: int | None) -> None:
    ring = make_topology(hosts, rank=0, group_size=group_size).ring
    assert sorted(ring) == list(range(len(hosts)))
    crossings = sum(hosts[ring[i - 1]] != hosts[rank] for i, rank in enumerate(ring))
    assert crossings == len(set(hosts))


@pytest.mark.parametrize("group_size", [0, -2])
def test_group_size_must_be_positive(group_size: int) -> None:
    with pytest.raises(ValueError, match=naming(f"group_size={group_size} ", "null")):
        make_topology(UNEVEN, rank=0, group_size=group_size)
