"""Effective training time of known progress, and which rank is killed."""

import json
from pathlib import Path

import pytest

from benchmarks.faults import effective
from benchmarks.faults.effective import Progress
from bigbatch.errors import UserError


def walked(*, until: float, fails: float, down: float, lost: int) -> Progress:
    """A step of 0.5 s each, from 0 on; at one moment it fails, is away for some seconds, and has lost some steps."""
    progress = Progress(strikes=[(fails, 1)])
    before = int(fails / 0.5)
    progress.steps = [(0.5 * step, step) for step in range(before + 1)]
    again = int((until - fails - down) / 0.5)
    progress.steps += [(fails + down + 0.5 * step, before - lost + step) for step in range(1, again + 1)]
    return progress


def test_nothing_is_lost_where_nothing_fails() -> None:
    progress = Progress([(0.5 * step, step) for step in range(101)])
    assert progress.step_seconds == 0.5
    assert progress.effective(50) == pytest.approx(1)
    assert list(progress.costs()) == []


def test_failure_costs_its_seconds_away_and_the_steps_that_were_lost() -> None:
    progress = walked(until=100, fails=40, down=8, lost=6)
    assert progress.step_seconds == 0.5
    # of 100 s, 8 away, and 6 steps of 0.5 s for nothing
    assert progress.effective(100) == pytest.approx(0.89)
    ((seconds, lost),) = progress.costs()
    assert (seconds, lost) == (pytest.approx(8 + 0.5 * 6), 6)
    assert progress.has_recovered


def test_ways_that_were_measured_are_recorded_where_another_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(way: effective.Method, folder: Path, options: object) -> Progress:
        if way.what.startswith("DDP"):
            raise UserError("the job ended")
        return Progress([(0.0, 20.0), (10.0, 40.0)])

    monkeypatch.setattr(effective, "follow", follow)
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["effective", "torchrun", "disk", "--seconds", "10", "--out", str(out)])
    with pytest.raises(UserError, match="DDP, a checkpoint every 300 steps: the job ended"):
        effective.main()
    ways = json.loads(out.read_text())["ways"]
    assert {name: way["effective_share"] for name, way in ways.items()} == {"disk": 1.0}
