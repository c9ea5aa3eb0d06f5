"""Effective training time of courses that are known, and who is struck."""

import json
import os
import subprocess
import sys
import time
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


def test_failure_that_was_not_made_good_has_no_cost_of_its_own() -> None:
    course = walked(until=52, fails=40, down=8, lost=20)
    assert list(course.costs()) == []
    assert not course.has_made_good, "it steps again, and is to be followed until it has"
    assert course.effective(52) == pytest.approx((80 - 20 + 8) * 0.5 / 52)


def test_moments_are_the_same_for_each_way_and_of_the_stated_mean() -> None:
    options = effective.parse(["--seconds", "100000", "--mean-seconds", "10", "--seed", "3"])
    first, second = (list(effective.moments(effective.random.Random(3), options)) for _ in range(2))
    assert first == second
    assert len(first) == pytest.approx(10_000, rel=0.05)  # five standard deviations of a Poisson count
    assert {rank for _, rank in first} == {0, 1}


@pytest.mark.parametrize(("text", "word"), [("", None), ('{"kind": "train", "time": 5.0, "step": 7}\n{"kin', (5.0, 7))])
def test_look_takes_the_last_whole_report(tmp_path: Path, text: str, word: tuple[float, int] | None) -> None:
    assert effective.look_at_run(tmp_path) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"kind": "start", "time": 1.0, "step": 0}\n' + text)
    assert effective.look_at_run(tmp_path) == word


def test_strike_takes_the_rank_and_neither_its_agent_nor_its_child() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    mark = f"mark-{os.getpid()}"
    agent = subprocess.Popen([*sleep, "torch.distributed.run"], env=os.environ | {effective.MARK: mark, "RANK": "1"})
    other = subprocess.Popen(sleep, env=os.environ | {effective.MARK: mark, "RANK": "0"})
    rank = subprocess.Popen(sleep, env=os.environ | {effective.MARK: mark, "RANK": "1"})
    time.sleep(0.02)  # younger by a tick of the kernel's clock
    child = subprocess.Popen(sleep, env=os.environ | {effective.MARK: mark, "RANK": "1"})
    try:
        assert effective.strike(mark, 1)
        assert rank.wait(30) == -9
        assert [process.poll() for process in (agent, other, child)] == [None] * 3
        assert not effective.strike(mark, 2)
    finally:
        for process in (agent, other, rank, child):
            process.kill()
            process.wait()


def test_way_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["effective", "horovod"])
    with pytest.raises(SystemExit, match="no way 'horovod' here: choose among memory, disk"):
        effective.run(effective.main)


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
