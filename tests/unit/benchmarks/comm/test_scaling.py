"""Scaling of the benchmarks of comm: which steps, efficiency, and its limit in closed form."""

import pytest

from benchmarks.comm import gradient_sets, scaling


def test_scaling_limit_of_efficiency_in_closed_form() -> None:
    # 100 MB, all ready when backward starts, over 2 nodes at 100 MB/s: 1 s, and a backward of 0.5 s hides half of it
    pace = gradient_sets.Pace([0.0, 0.5], forward_seconds=0.25)
    found = scaling.limit_efficiency(pace, [100_000_000, 0], num_nodes=2, goodput=800e6)
    assert found == pytest.approx(0.75 / (0.75 + 0.5))
    assert scaling.limit_efficiency(pace, [100_000_000, 0], num_nodes=1, goodput=None) == 1
