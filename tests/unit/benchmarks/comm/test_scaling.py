"""Scaling of the benchmarks of comm: which steps, efficiency, and its limit in closed form."""

import pytest

from benchmarks.comm import gradient_sets, scaling, turns


def test_scaling_limit_of_efficiency_in_closed_form() -> None:
    # 100 MB, all ready when backward starts, over 2 nodes at 100 MB/s: 1 s, and a backward of 0.5 s hides half of it
    pace = gradient_sets.Pace([0.0, 0.5], forward_seconds=0.25)
    found = scaling.limit_efficiency(pace, [100_000_000, 0], num_nodes=2, goodput=800e6)
    assert found == pytest.approx(0.75 / (0.75 + 0.5))
    assert scaling.limit_efficiency(pace, [100_000_000, 0], num_nodes=1, goodput=None) == 1


def test_scaling_efficiency_is_of_pairs() -> None:
    def repetitions(*seconds: float) -> list[turns.Repetition]:
        return [turns.Repetition(each, 0.1, (0,)) for each in seconds]

    rows = scaling.describe(
        "weak", {"ddp": repetitions(2.0, 4.0), "local": repetitions(1.0, 3.0)}, seconds=1.0, limit=0.9
    )
    assert rows[0]["efficiency"] == {**rows[0]["efficiency"], "median": 0.625, "min": 0.5, "max": 0.75}
