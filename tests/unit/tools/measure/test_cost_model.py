"""The formulas, against sums over hops written out, and the papers' step counts."""

import pytest
from error_texts import naming

from bigbatch.tools.measure.cost_model import (
    MODELS,
    ClusterModel,
    LinkModel,
    doubling_seconds,
    hierarchical_seconds,
    lower_bound_seconds,
    ring_seconds,
    sharded_seconds,
)

INSIDE, ACROSS = LinkModel(2e-6, 50e9), LinkModel(30e-6, 3e9)
CLUSTERS = [(1,), (8,), (1, 1, 1, 1), (2, 2, 2, 2), (4, 4), (8,) * 16]


def cluster(*group_sizes: int, g: float = 0.0) -> ClusterModel:
    return ClusterModel(group_sizes, INSIDE, ACROSS, g)


@pytest.mark.parametrize("P", [1, 2, 3, 8, 1024])
def test_ring_is_the_textbook_formula(P: int) -> None:
    a, b, g, M = 30e-6, 1 / 3e9, 1e-11, 25_000_000
    expected = 2 * (P - 1) * a + 2 * (P - 1) / P * M * b + (P - 1) / P * M * g
    assert ring_seconds(M, cluster(*(1,) * P, g=g)) == pytest.approx(expected, rel=1e-12)
    # the slowest hop sets the pace
    assert ring_seconds(1e6, cluster(8)) == pytest.approx(14 * (2e-6 + 1e6 / 8 / 50e9), rel=1e-12)
    assert ring_seconds(1e6, cluster(4, 4)) == pytest.approx(14 * (30e-6 + 1e6 / 8 / 3e9), rel=1e-12)


def test_hierarchical_steps_of_the_paper() -> None:
    """Jia et al. 2018: 1,024 GPUs in groups of 16 take 60 + 126 = 186 steps instead of 2,046."""
    unit = LinkModel(1.0, float("inf"))
    big = ClusterModel((16,) * 64, unit, unit)
    assert ring_seconds(1, big) == 2046
    assert hierarchical_seconds(1, big) == 4 * 15 + 2 * 63
    assert doubling_seconds(1, big) == 2 + 6  # in and out of a node, log2(64) across
    assert sharded_seconds(1, big) == 2 * 15 + 2 * 63  # Mikami et al. 2018: 2(X-1) + 2(Y-1)


@pytest.mark.parametrize("group_sizes", CLUSTERS)
@pytest.mark.parametrize("num_bytes", [1, 1000, 10**8])
def test_cost_of_sums_over_hops(group_sizes: tuple[int, ...], num_bytes: int) -> None:
    """Each algorithm hop by hop; k columns of the sharded form share a node's link."""
    k, m, g = group_sizes[0], len(group_sizes), 3e-11
    inside = [INSIDE.seconds(num_bytes / k) for _ in range(k - 1)]
    leaders = [ACROSS.seconds(num_bytes / m) for _ in range(2 * (m - 1))]
    columns = [30e-6 + k * (num_bytes / k / m) / 3e9 for _ in range(2 * (m - 1))]
    node_sums = (k - 1) * num_bytes / k * g
    expected = {
        "hierarchical": 4 * sum(inside) + sum(leaders) + node_sums + (m - 1) * num_bytes / m * g,
        "sharded": 2 * sum(inside) + sum(columns) + node_sums + (m - 1) * num_bytes / k / m * g,
    }
    for name, seconds in expected.items():
        assert MODELS[name](num_bytes, cluster(*group_sizes, g=g)) == pytest.approx(seconds, rel=1e-12), name


@pytest.mark.parametrize(("m", "hops", "sums"), [(1, 0, 0), (2, 1, 1), (3, 3, 2), (4, 2, 2), (6, 4, 3), (64, 6, 6)])
def test_doubling_by_hops(m: int, hops: int, sums: int) -> None:
    """Whole tensors every hop; where m is not a power of two, one hop and sum before and one hop after."""
    for M in (1e3, 1e6):
        inside = 2 * (2e-6 + 3 * M / 50e9)
        expected = inside + hops * (30e-6 + M / 3e9) + (3 + sums) * M * 1e-11
        assert doubling_seconds(M, cluster(*(4,) * m, g=1e-11)) == pytest.approx(expected, rel=1e-12)
        assert doubling_seconds(M, cluster(*(1,) * m)) == pytest.approx(hops * (30e-6 + M / 3e9), rel=1e-12)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("group_sizes", [sizes for sizes in CLUSTERS if len(sizes) > 1])
def test_limit_of_the_links_is_beaten_by_nothing(name: str, group_sizes: tuple[int, ...]) -> None:
    for num_bytes in (1, 10**6, 10**9):
        limit = lower_bound_seconds(num_bytes, num_nodes=len(group_sizes), bytes_per_second=3e9)
        assert MODELS[name](num_bytes, cluster(*group_sizes)) >= limit


def test_cost_of_uneven_nodes() -> None:
    """The fullest node sets the pace; the sharded form has as many shards as the smallest one has ranks."""
    for seconds in (hierarchical_seconds, doubling_seconds):
        assert seconds(1e6, cluster(3, 2, 2, 1)) == seconds(1e6, cluster(3, 3, 3, 3))
    # 5 + 2 ranks, 2 shards: each is reduced (4 + 4 hops) and broadcast (8 hops) inside, in fifths of itself
    inside = 2 * 16 * INSIDE.seconds(1e6 / 2 / 5)
    across = 2 * (30e-6 + 2 * (1e6 / 2 / 2) / 3e9)
    sums = (4 / 5 * 1e6 + 1e6 / 2 / 2) * 1e-11
    assert sharded_seconds(1e6, cluster(5, 2, g=1e-11)) == pytest.approx(inside + across + sums, rel=1e-12)


@pytest.mark.parametrize("group_sizes", [(), (2, 0)])
def test_cluster_has_nodes_and_nodes_have_ranks(group_sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=naming(f"group_sizes={group_sizes} ")):
        cluster(*group_sizes)
