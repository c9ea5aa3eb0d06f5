"""Figures of a job that interruptions cut into several runs."""

import json
import time

import pytest

from bigbatch.trainer.report import job_figures
from bigbatch.trainer.report.job_figures import JOINED, LOST, OTHER, JobFigures, add_up
from bigbatch.trainer.step.window import Totals, straggler_hint


def totals(steps: int, lags_P: list[float]) -> Totals:
    """Steps of 2 s, in which ranks waited 0.5 s for images."""
    return Totals(steps, 2.0 * steps, 0.5 * steps, exposed_seconds=1.0, first_report_seconds=2.0, lag_seconds_P=lags_P)


def test_totals_of_two_runs_add_up() -> None:
    both = add_up(totals(5, [0.25, 2.0]), totals(3, [0.0, 1.0]))
    assert (both.steps, both.step_seconds, both.input_wait_seconds) == (8, 16.0, 4.0)
    assert (both.exposed_seconds, both.first_report_seconds, both.lag_seconds_P) == (2.0, 4.0, [0.25, 3.0])
    after_a_loss = add_up(totals(5, [0.25, 2.0]), totals(3, [1.0]))
    assert after_a_loss.lag_seconds_P == [1.0], "the ranks have other numbers"
    assert add_up(Totals(measures_waits=False), totals(3, [])).measures_waits, "the former had no step"
    assert straggler_hint(0.5, [], host_of=str) is None


def test_run_that_measured_no_waits_counts_with_the_share_of_the_other() -> None:
    """As after a step that could not be captured. Steps of 2 s each; the first report has one of them."""
    captured = Totals(3, 6.0, 1.5, measures_waits=False, first_report_seconds=2.0)
    eager = Totals(5, 10.0, 2.5, exposed_seconds=1.0, first_report_seconds=2.0, straggler_seconds=0.8)
    for both in (add_up(captured, eager), add_up(eager, captured)):
        assert (both.steps, both.measures_waits) == (8, True)
        assert both.exposed_seconds / both.step_seconds == pytest.approx(1.0 / 10.0)
        assert both.straggler_seconds / (16.0 - 4.0) == pytest.approx(0.8 / 8.0)
    assert not add_up(captured, captured).measures_waits


def test_job_counts_losses_and_joins_and_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    job = JobFigures()
    assert job.start_run(7) == {}
    clock = 103.0
    job.start_steps()
    assert (job.summary(), job.first_step) == ({}, 7)
    for kind, seconds in ((LOST, 0.5), (LOST, 1.0), (OTHER, 4.0), (JOINED, 2.0)):
        clock += 10
        job.interrupt(totals(5, []))
        job.count(kind)
        clock += seconds
        assert job.start_run(9) == {"interruption": kind, "interruption_seconds": seconds}
        clock += 0.25  # an evaluation that was due
        job.start_steps()
    assert job.seconds == 40 + 7.5 + 1
    assert job.first_step == 7
    assert job.total(totals(2, [])).steps == 22
    expected = {"num_rank_losses": 2, "rank_loss_seconds": 1.5, "num_rank_joins": 1, "rank_join_seconds": 2.0}
    assert job.summary() == expected


def test_rank_that_joins_has_the_figures_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may become the first rank, which writes the summary."""
    clock = 100.0
    monkeypatch.setattr(job_figures.time, "perf_counter", lambda: clock)
    job = JobFigures()
    job.start_run(0)
    job.start_steps()
    clock = 150.0
    job.interrupt(totals(5, [1.0]))
    announced = json.loads(json.dumps(job.announce()))
    clock = 1007.0  # of another process
    joined = JobFigures(announced, waited_seconds=2.0)
    clock = 1008.0
    joined.start_run(5)
    joined.start_steps()
    assert joined.summary() == {"num_rank_joins": 1, "rank_join_seconds": 3.0}
    assert (joined.seconds, joined.first_step, joined.total(totals(1, [])).steps) == (51.0, 0, 6)
