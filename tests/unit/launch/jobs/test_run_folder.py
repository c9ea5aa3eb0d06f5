"""What a launcher sees of the run that it has started."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from owned_folder import owning

from bigbatch.comm.rendezvous.environ import STOPPED_VARIABLE
from bigbatch.launch.jobs.run_folder import CHECKS_AFTER_FAILURE, FirstRankWatch, count_joins, has_begun, newest_report
from bigbatch.launch.jobs.spec import JobSpec


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(STOPPED_VARIABLE, "start 1")
    return "start 1"


def check(watch: FirstRankWatch) -> bool:
    """Ask, and let the look at storage end."""
    told = watch()
    assert watch._thread is not None
    watch._thread.join()
    return told


def fail(folder: Path) -> None:
    with suppress(ZeroDivisionError), owning(folder):
        raise ZeroDivisionError


def test_newest_report_has_the_figures_that_are_numbers(tmp_path: Path) -> None:
    assert newest_report(tmp_path) is None
    record = {"kind": "eval", "step": 4, "epoch": 2.0, "loss": 10**400, "top1": "x", "images_per_second": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record))
    assert newest_report(tmp_path) == {"step": 4, "epoch": 2.0}


def test_run_is_left_some_looks_after_its_owner_has_failed(tmp_path: Path, start: str) -> None:
    """The other ranks may take theirs to end."""
    watch = FirstRankWatch(str(tmp_path / "run"), launch_id=start)
    assert not any(check(watch) for _ in range(9)), "no process owns the folder yet"
    with owning(tmp_path / "run"):
        assert not any(check(watch) for _ in range(9))
    fail(tmp_path / "run")
    assert [check(watch) for _ in range(CHECKS_AFTER_FAILURE + 2)] == [False] * (CHECKS_AFTER_FAILURE + 1) + [True]


def test_job_without_a_run_folder_is_left_after_its_first_rank_recorded_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "file"
    watch = FirstRankWatch(None, launch_id=str(file))
    for record in ("", "begun", "0", "130"):
        file.write_text(record)
        assert not any(check(watch) for _ in range(CHECKS_AFTER_FAILURE + 2))
    file.write_text("6")
    assert [check(watch) for _ in range(CHECKS_AFTER_FAILURE + 2)][-1]


@pytest.mark.parametrize(
    ("heals", "record", "looks"), [(False, "0", 9), (False, "6", 4), (True, "6", 9), (True, "0", 9)]
)
def test_launcher_is_left_some_time_after_its_first_rank_ended_well(
    heals: bool, record: str, looks: int, tmp_path: Path
) -> None:
    """It may wait for what a rank on another host left behind; in a job that heals another rank may take over."""
    (tmp_path / "file").write_text(record)
    watch = FirstRankWatch(None, launch_id=str(tmp_path / "file"), end_seconds=8, heals=heals)
    assert [check(watch) for _ in range(looks + 1)] == [False] * looks + [True]


def test_run_is_not_left_for_the_failure_of_another_job(
    tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job owned the folder, and ended while this job's ranks still import."""
    watch = FirstRankWatch(str(tmp_path), launch_id=start)
    for other in ("start 2", ""):
        monkeypatch.setenv(STOPPED_VARIABLE, other)
        fail(tmp_path)
        assert not any(check(watch) for _ in range(9))


def test_storage_that_does_not_answer_holds_no_launcher_up(tmp_path: Path, start: str) -> None:
    """It must react to Ctrl-C, and to the launcher's end."""
    os.mkfifo(tmp_path / ".owner-1")
    watch = FirstRankWatch(str(tmp_path), launch_id=start)
    assert not any(watch() for _ in range(9))
    os.close(os.open(tmp_path / ".owner-1", os.O_RDWR | os.O_NONBLOCK))  # lets the thread go


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--run.heal in_place", 3),
        ("--run.heal in_place --comm.backend tcp", 3),
        ("--run.heal restart", 0),
        ("--run.heal in_place --comm.backend mpi", 0),
        ("--run.heal in_place --optimizer.sharded true", 0),
        ("--run.heal in_place --run.resume never", 0),
        ("--run.heal nowhere", 0),
    ],
)
def test_lost_rank_starts_again_only_if_the_others_can_give_it_their_state(words: str, expected: int) -> None:
    command = ("train", "--config", "quickstart", *words.split())
    assert count_joins(JobSpec(command, 2, restarts=3)) == expected
    assert count_joins(JobSpec(command, 2)) == 0


def test_job_has_begun_once_it_owns_its_run_folder(tmp_path: Path) -> None:
    command = ("train", "--config", "quickstart", "--run.directory", str(tmp_path / "run"), "--run.heal", "in_place")
    job, joins = JobSpec(command, 2), JobSpec(command, 2, num_nodes=2, restarts=1)
    begun, begun_elsewhere = has_begun(job), has_begun(joins)
    assert not begun_elsewhere()
    assert not begun()
    with owning(tmp_path / "run"):
        assert begun()
        assert begun_elsewhere(), "a rank that joins looks there, too"
    assert begun(), "and has ended"
    again = has_begun(job)
    assert not again()
    with owning(tmp_path / "run"):
        assert again()
    several = JobSpec(job.command, 2, num_nodes=2)
    assert has_begun(several)(), "the folder may be on another one"
