"""Effective training time of courses that are known, and who is struck."""

import json
from pathlib import Path

import pytest

from benchmarks.faults import effective
from benchmarks.faults.effective import Course
from bigbatch.errors import UserError


def walked(*, until: float, fails: float, down: float, lost: int) -> Course:
    """A step of 0.5 s each, from 0 on; at one moment it fails, is away for some seconds, and has lost some steps."""
    course = Course(strikes=[(fails, 1)])
    before = int(fails / 0.5)
    course.steps = [(0.5 * step, step) for step in range(before + 1)]
    again = int((until - fails - down) / 0.5)
    course.steps += [(fails + down + 0.5 * step, before - lost + step) for step in range(1, again + 1)]
    return course


def test_nothing_is_lost_where_nothing_fails() -> None:
    course = Course([(0.5 * step, step) for step in range(101)])
    assert course.step_seconds == 0.5
    assert course.effective(50) == pytest.approx(1)
    assert list(course.costs()) == []


def test_failure_costs_its_seconds_away_and_the_steps_that_were_lost() -> None:
    course = walked(until=100, fails=40, down=8, lost=6)
    assert course.step_seconds == 0.5
    # of 100 s, 8 away, and 6 steps of 0.5 s for nothing
    assert course.effective(100) == pytest.approx(0.89)
    ((seconds, lost),) = course.costs()
    assert (seconds, lost) == (pytest.approx(8 + 0.5 * 6), 6)
    assert course.has_made_good


def test_ways_that_were_measured_are_recorded_where_another_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(way: effective.Way, folder: Path, options: object) -> Course:
        if way.what.startswith("DDP"):
            raise UserError("the job ended")
        return Course([(0.0, 20.0), (10.0, 40.0)])

    monkeypatch.setattr(effective, "follow", follow)
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["effective", "torchrun", "disk", "--seconds", "10", "--out", str(out)])
    with pytest.raises(UserError, match="DDP, a checkpoint every 300 steps: the job ended"):
        effective.main()
    ways = json.loads(out.read_text())["ways"]
    assert {name: way["effective_share"] for name, way in ways.items()} == {"disk": 1.0}
