"""Law 2: kill or stop a run at any moment; the resumed one ends with the bits of the uninterrupted one."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from bigbatch.trainer.folder.folder import RunDir
from tests.laws.jobs import (
    AUGMENTED,
    ROUNDING,
    SGD,
    TIMEOUT_SECONDS,
    Forked,
    ForkedJob,
    alone,
    assert_identical,
    cut_back,
    final_state,
    forked,
    gradient_distance,
    have_ended,
    held,
    kill_rank,
    newest_step,
    rank_pids,
    records,
    run,
    start,
    statistics_distance,
    step_gradients,
    steps,
    train_command,
    wait_until,
)

STEPS_PER_EPOCH = 5
LONG = {"run.epochs": 2, "run.checkpoint_every_steps": 3, "run.eval_every_epochs": 2}


@pytest.mark.parametrize(
    ("loader", "settings"),
    [pytest.param("dali", AUGMENTED, marks=pytest.mark.long), ("torchvision", {})],
    ids=["dali-augmented", "torchvision"],
)
def test_killed_rank_changes_no_bit(loader: str, settings: dict[str, object], data: Path, tmp_path: Path) -> None:
    whole, broken, go_on = tmp_path / "whole", tmp_path / "broken", tmp_path / "go_on"
    overrides = {**LONG, **settings, "data.loader": loader, **held(broken, reports=6, until=go_on)}
    go_on.touch()
    run(forked(train_command(data, whole, overrides), ranks=2))

    go_on.unlink()
    command = forked(train_command(data, broken, overrides), ranks=2)
    log = tmp_path / "broken.log"
    process = start(command, log)
    wait_until(lambda: newest_step(broken) >= 4, process=process, log=log)
    kill_rank(process)
    go_on.touch()
    assert process.wait(timeout=TIMEOUT_SECONDS) != 0, "a job that lost a rank must fail"
    resumed_after = newest_step(broken)
    assert resumed_after == 6, "the last checkpoint before the rank was killed"
    assert "rank 1" in log.read_text(), log.read_text()

    done = run(command)
    assert f"resumed after step {resumed_after}" in done.stdout
    assert "another way than in the checkpoint" not in done.stdout
    assert_identical(final_state(broken), final_state(whole))
    assert steps(broken) == steps(whole), "each report stands once, in order"


UNPLANNED = {"data.loader": "torchvision", "run.epochs": 2, "run.checkpoint_every_steps": 0, "run.eval_every_epochs": 2}
ACKNOWLEDGED = "will save a checkpoint after this step"


@pytest.fixture(scope="module")
def not_stopped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("not_stopped")
    (folder / "go_on").touch()
    settings = {**UNPLANNED, **held(folder / "run", reports=4, until=folder / "go_on")}
    run(forked(train_command(data, folder / "run", settings), ranks=2))
    return folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_ctrl_c_saves_a_checkpoint_and_changes_no_bit(
    launcher: str, data: Path, not_stopped: Path, tmp_path: Path
) -> None:
    """Stopped where no checkpoint was planned, in the middle of an epoch, by the launcher's Ctrl-C."""
    stopped, go_on = tmp_path / "stopped", tmp_path / "go_on"
    command = train_command(data, stopped, {**UNPLANNED, **held(stopped, reports=4, until=go_on)})
    launch = [sys.executable, "-m", "bigbatch", "launch", launcher, "--ranks", "2", "--", *command]
    log = tmp_path / "stopped.log"
    process = start(launch, log)
    wait_until(lambda: len(steps(stopped)) >= 4, process=process, log=log)
    ranks = rank_pids(process.pid)
    os.kill(process.pid, signal.SIGINT)
    wait_until(lambda: ACKNOWLEDGED in log.read_text(), process=process, log=log)
    go_on.touch()
    assert process.wait(timeout=TIMEOUT_SECONDS) == 130, log.read_text()
    assert have_ended(ranks, within_seconds=60), "a rank was left behind"
    assert 5 <= newest_step(stopped) < 2 * STEPS_PER_EPOCH, "after the step that was under way"
    assert not RunDir(stopped).summary.exists(), "an interrupted run has no result"
    assert "the same command continues" in log.read_text()
    assert launcher != "mpirun" or "non-zero status" not in log.read_text()

    run(forked(command, ranks=2))
    assert_identical(final_state(stopped), final_state(not_stopped))


SELDOM = {"run.log_every_steps": 100, "run.epochs": 2, "data.loader": "torchvision"}


@pytest.fixture(scope="module")
def seldom_reported(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seldom_reported")
    run(forked(train_command(data, folder, SELDOM), ranks=2))
    return folder


@pytest.mark.parametrize(
    ("begun", "done"),
    [("step 7 begins", {7}), pytest.param("evaluation batch begins", {5}, marks=pytest.mark.long)],
    ids=["step", "evaluation"],
)
def test_one_ranks_signal_stops_all_after_the_slow_step_under_way(
    begun: str, done: set[int], data: Path, seldom_reported: Path, tmp_path: Path
) -> None:
    """In the middle of an epoch and long before a report, or in an evaluation, which the resumed run does again."""
    command = tuple(train_command(data, tmp_path / "run", {**SELDOM, "run.eval_every_epochs": 1}))
    log, go_on = tmp_path / "log", tmp_path / "go_on"
    place = {"HELD_AT": begun, "HELD_UNTIL": str(go_on)}
    job = ForkedJob(Forked(command, ranks=2, target="tests.laws.ranks_slow:main"), log, **place)
    wait_until(lambda: log.exists() and log.read_text().count(begun) == 2, process=job, log=log)
    os.kill(job.ranks[1].pid or 0, signal.SIGTERM)
    # the other rank hears of it, and says so, in the midst of the step
    wait_until(lambda: f"another rank's signal: {ACKNOWLEDGED}" in log.read_text(), process=job, log=log)
    go_on.touch()
    assert job.wait(timeout=TIMEOUT_SECONDS) == 130, log.read_text()
    text = log.read_text()
    assert {newest_step(tmp_path / "run")} == done, text
    assert not records(tmp_path / "run", "eval")[1:]

    run(forked(command, ranks=2))
    assert_identical(final_state(tmp_path / "run"), final_state(seldom_reported))
    assert [record["step"] for record in records(tmp_path / "run", "eval")] == [5, 10]


def test_another_world_size_goes_on_with_the_same_samples(data: Path, tmp_path: Path) -> None:
    """Two ranks train the first half, three the rest: as one rank alone, up to rounding."""
    constant = {
        **SGD,
        "schedule.name": "step",
        "schedule.options.milestone_epochs": "[]",
        "schedule.options.gamma": 0.1,
        "schedule.end_lr": "null",
    }
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    run(alone(train_command(data, whole, {**constant, "run.epochs": 2})))
    run(forked(train_command(data, moved, {**constant, "run.epochs": 1}), ranks=2))
    done = run(forked(train_command(data, moved, {**constant, "run.epochs": 2}), ranks=3))
    assert f"resumed after step {STEPS_PER_EPOCH}" in done.stdout
    assert "sums over ranks go another way than in the checkpoint (ranks 2, now 3" in done.stdout
    assert gradient_distance(step_gradients(moved), step_gradients(whole)) < ROUNDING
    assert statistics_distance(final_state(moved), final_state(whole)) < ROUNDING


@pytest.mark.long
def test_the_layout_of_the_gradients_is_resumed_with_them(data: Path, tmp_path: Path) -> None:
    """In a ring of three the place of a gradient in its buffer decides in which order it is added up.

    The model uses its layers in another order than it makes them, so the first step lays the buffers out again.
    """
    overrides = {
        **SGD,
        "schedule.base_lr": 0.01,
        "data.loader": "torchvision",
        "model.name": "tests.laws.foreign_models.UsedInAnotherOrder",
        "batch.global_batch_size": 24,
        "run.epochs": 1,
        "schedule.warmup_epochs": 0,
        "comm.algorithm": "ring",
    }
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(forked(train_command(data, whole, overrides), ranks=3))
    step = cut_back(whole, resumed, num_checkpoints=2)
    done = run(forked(train_command(data, resumed, overrides), ranks=3))
    assert f"resumed after step {step}" in done.stdout
    assert_identical(final_state(resumed), final_state(whole))


@pytest.mark.long
def test_weights_to_start_from_are_read_once(data: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(alone(train_command(data, first, {"run.epochs": 1})))
    start = list_checkpoints(first / "checkpoints")[-1].path
    tuned = {"model.weights": start, "run.epochs": 1, "schedule.base_lr": 1e-9, "schedule.end_lr": 0}
    done = run(alone(train_command(data, second, tuned)))
    assert f"starts from the weights in {start}" in done.stdout
    before, after = (final_state(folder)["model/linear.weight"] for folder in (first, second))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    shutil.rmtree(start)
    done = run(alone(train_command(data, second, {**tuned, "run.epochs": 2})))
    assert "resumed after step" in done.stdout
    assert "starts from" not in done.stdout
