"""Scaling of the benchmarks of comm: which steps, efficiency, and its limit in closed form."""

from typing import Any

import pytest

from benchmarks.comm import (
    gradient_sets,
    scaling,
    targets,
    turns,
)


def test_scaling_weak_and_strong_steps() -> None:
    assert scaling.step_lengths(3.0, 6.0, num_nodes=4) == {"weak": 3.0, "strong": 1.5}
    assert scaling.step_lengths(None, 6.0, num_nodes=1) == {"strong": 6.0}


def test_pace_keeps_its_shares() -> None:
    pace = gradient_sets.Pace([2.0, 1.0], forward_seconds=1.0)  # backward twice as long as forward
    assert pace.seconds == 3.0
    pace.take(1.5)
    pace.take(6.0)
    assert (pace.seconds, pace.ready_seconds) == (6.0, [4.0, 2.0])


def test_scaling_limit_of_efficiency_in_closed_form() -> None:
    # 100 MB, all ready when backward starts, over 2 nodes at 100 MB/s: 1 s, of which a backward of 0.5 s hides half
    pace = gradient_sets.Pace([0.0, 0.5], forward_seconds=0.25)
    found = scaling.limit_efficiency(pace, [100_000_000, 0], num_nodes=2, goodput=800e6)
    assert found == pytest.approx(0.75 / (0.75 + 0.5))
    assert scaling.limit_efficiency(pace, [100_000_000, 0], num_nodes=1, goodput=None) == 1


def test_scaling_efficiency_is_of_pairs() -> None:
    def repetitions(*seconds: float) -> list[turns.Repetition]:
        return [turns.Repetition((each,), 0.1, (0,)) for each in seconds]

    rows = scaling.describe(
        "weak", {"ddp": repetitions(2.0, 4.0), "local": repetitions(1.0, 3.0)}, seconds=1.0, limit=0.9
    )
    assert rows[0]["efficiency"] == {**rows[0]["efficiency"], "median": 0.625, "min": 0.5, "max": 0.75}


def test_scaling_is_judged_where_the_links_allow_it() -> None:
    def row(mode: str, name: str, efficiency: float, limit: float) -> dict[str, Any]:
        return {
            "scaling": mode,
            "contestant": name,
            "efficiency": {"median": efficiency},
            "limit_efficiency": limit,
        }

    rows = [row("weak", "ours tuned", 0.96, 1.0), row("weak", "ddp", 0.9, 1.0), row("strong", "ours tuned", 0.7, 0.8)]
    verdicts = targets.judge_scaling("scaling-x", {"num_wrong": {"ddp": 1}, "rows": rows})
    assert [(each.what, each.measured, each.is_met) for each in verdicts] == [
        ("wrong values, all contestants", "1", False),
        ("ours tuned: weak scaling efficiency", "0.960; ddp 0.900", True),
    ]


@pytest.mark.parametrize("options", [(), ("--weak", "0"), ("--strong", "-1")])
def test_scaling_without_steps_is_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        scaling.parse(["--out", "x", *options])
