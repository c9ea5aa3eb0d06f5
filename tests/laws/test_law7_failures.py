"""Law 7: failure is loud, bounded and lossless: one clear line, a non-zero exit, nothing lost."""

import os
import re
import shutil
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import bigbatch, exit_codes, places, start_rank
from torch import Tensor

from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import DIFFERENT, LOST
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from bigbatch.trainer.folder.folder import RunDir, read_records
from tests.laws.jobs import (
    SGD,
    TIMEOUT_SECONDS,
    Forked,
    ForkedJob,
    alone,
    copy_of,
    fails,
    forked,
    kill_rank,
    newest_step,
    run,
    start,
    train_command,
    wait_until,
)

KEPT = {"run.checkpoint_every_steps": 5}
BOUNDS = {"comm.timeout_seconds": 12, "comm.warn_seconds": 6, "data.patience_seconds": 5}
LONG = {"run.epochs": 400, "run.checkpoint_every_steps": 3, "run.eval_every_epochs": 400}


@pytest.fixture(scope="module")
def first(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a run of two epochs that keeps the checkpoints of steps 5 and 10, and its output."""
    folder = tmp_path_factory.mktemp("first")
    return folder, run(alone(train_command(data, folder, KEPT))).stdout


@pytest.fixture
def finished(first: tuple[Path, str], tmp_path: Path) -> Path:
    """Return a copy of that run, to continue with."""
    return Path(shutil.copytree(first[0], tmp_path / "run"))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"run.epoch": 3}, ["run.epoch", "run.epochs"]),
        ({"batch.global_batch_size": 512}, ["batch.global_batch_size=512", "160"]),
        ({"data.num_classes": 12}, ["data.num_classes=12", "10 classes"]),
        ({"data.root": "nowhere/at/all"}, ["nowhere/at/all/train"]),
        ({"run.resume": "nowhere/step-1"}, ["nowhere/step-1"]),
        ({"comm.backend": "nccl"}, ["0 GPUs", "comm.backend"]),
        ({"schedule.base_lr": 1e30, "optimizer.options.momentum_form": "lr_outside"}, ["loss is", "schedule.base_lr"]),
    ],
)
def test_bad_setting_is_one_line(overrides: dict[str, object], parts: list[str], data: Path, tmp_path: Path) -> None:
    line = fails(alone(train_command(data, tmp_path / "run", overrides)))
    for part in parts:
        assert part in line


def bigbatch_with_a_broken_rank(*command: str) -> int:
    """What a rank runs: bigbatch, where rank 1 computes nonsense from its third step on, as a broken GPU does."""
    calls, healthy = count(1), F.cross_entropy

    def broken(logits_BK: Tensor, targets: Tensor, **options: Any) -> Tensor:
        loss = healthy(logits_BK, targets, **options)
        return loss if next(calls) <= 2 * 2 else loss * torch.nan  # two ranks share four microbatches

    if read_process_env().rank == 1:
        F.cross_entropy = broken
    return bigbatch(*command)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_nan_of_one_rank_names_rank_and_step_and_is_not_saved(precision: str, data: Path, tmp_path: Path) -> None:
    settings = {"optimizer.precision": precision, "run.checkpoint_every_steps": 1}
    if precision == "fp16":
        settings |= {"optimizer.loss_scale": 1024, "optimizer.loss_scale_growth_steps": 2000}
    target = "tests.laws.test_law7_failures:bigbatch_with_a_broken_rank"
    job = Forked(tuple(train_command(data, tmp_path, settings)), ranks=2, target=target)
    if precision == "fp16":  # an overflow of one rank alone is usual, so no check follows
        line = fails(job)
        assert "the loss is nan since step 3, which began on rank 1 of 2 alone: look at the images and the GPU" in line
    else:
        line = run(job, expect=DIFFERENT).stderr
        assert "in step 3 rank 1 on " in line
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints")] == [1, 2]


def test_more_ranks_than_microbatches(data: Path, tmp_path: Path) -> None:
    line = fails(forked(train_command(data, tmp_path / "run", {}), ranks=5))
    assert "batch.global_batch_size=32 with batch.microbatch_size=8 has 4 microbatches, fewer than 5 ranks: " in line


def test_class_missing_in_validation(data: Path, tmp_path: Path) -> None:
    broken = copy_of(data, tmp_path)
    shutil.rmtree(broken / "val" / "ring")
    assert "ring" in fails(alone(train_command(broken, tmp_path / "run", {})))


@pytest.mark.parametrize(("loader", "num_bytes"), [("dali", 600), ("torchvision", 0)], ids=["truncated", "empty"])
def test_file_that_is_no_image_is_named(loader: str, num_bytes: int, data: Path, tmp_path: Path) -> None:
    broken = copy_of(data, tmp_path)
    victim = sorted((broken / "train" / "disk").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:num_bytes])
    assert str(victim) in fails(alone(train_command(broken, tmp_path / "run", {"data.loader": loader})))


def test_ranks_that_disagree_on_the_config(data: Path, tmp_path: Path) -> None:
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [
        start_rank(
            "forked_ranks:bigbatch",
            train_command(data, tmp_path / "run", {"run.seed": rank}),
            environ=place,
            stdout=logs[rank],
            stderr=logs[rank],
        )
        for rank, place in enumerate(places(2))
    ]
    assert exit_codes(ranks, timeout_seconds=TIMEOUT_SECONDS) == [1, 1]
    for log in logs:
        assert "rank 1 and rank 0 disagree on the config: 'seed: 1' against 'seed: 0'" in log.read_text()


def test_truncated_checkpoint_is_set_aside_for_an_intact_one(data: Path, finished: Path) -> None:
    older, newest = (c.path for c in list_checkpoints(finished / "checkpoints"))
    state = newest / "state.pt"
    state.write_bytes(state.read_bytes()[:-1000])
    command = train_command(data, finished, {**KEPT, "run.epochs": 3, "run.keep_checkpoints": 9})
    line = fails(alone([*command, f"--run.resume={newest}"]))
    assert f"{newest} is truncated" in line
    assert str(older) in line
    said = run(alone(command)).stdout
    assert f"{newest} is truncated" in said
    assert f"continues from {older}" in said
    assert "resumed after step 5" in said
    (aside,) = (finished / "checkpoints").glob("damaged-*")
    assert str(aside) in said
    (record,) = (r for r in read_records(RunDir(finished).metrics) if r["kind"] == "damaged")
    assert (record["step"], record["set_aside"]) == (5, str(aside))
    done = run(alone([*command, f"--run.resume={older}"]))
    assert "resumed after step 5" in done.stdout
    assert "set aside" in done.stdout, "what that run will not go through"
    assert "resumed after step 15" in run(alone([*command, "--run.epochs=4"])).stdout, "auto continues where that ended"


def test_used_folder_is_not_overwritten(data: Path, finished: Path) -> None:
    never = {**KEPT, "run.resume": "never"}
    assert "holds a run already" in fails(alone(train_command(data, finished, never)))


def test_checkpoint_of_another_experiment_is_refused(data: Path, finished: Path) -> None:
    for overrides, words in (
        ({"model.options.width": 8}, "is of another model: "),
        ({**SGD, "run.epochs": 3}, "holds the state of optimizer.name=lars, which is not that of sgd"),
        (
            {"run.epochs": 1, "schedule.warmup_epochs": 0},
            "run.epochs=1 end at step 5, but the checkpoint is of step 10",
        ),
        ({"run.epochs": 3, "run.seed": 5}, "another run.seed"),
        ({"run.epochs": 3, "batch.global_batch_size": 16}, "another batch.global_batch_size"),
    ):
        assert words in fails(alone(train_command(data, finished, {**KEPT, **overrides})))
    assert "is of another model" in fails(alone(["evaluate", str(finished), "--model.options.width=8"]))


def test_changed_setting_takes_effect_and_is_said(data: Path, finished: Path) -> None:
    done = run(alone(train_command(data, finished, {**KEPT, "run.epochs": 3, "optimizer.momentum": 0.5})))
    changed = "resuming with a changed config: run.epochs=3 (was 2), optimizer.momentum=0.5 (was 0.9)\n"
    assert changed in done.stdout
    state = load_checkpoint(list_checkpoints(finished / "checkpoints")[-1].path)
    assert {group["momentum"] for group in state["optimizer"]["param_groups"]} == {0.5}


def test_weights_that_are_no_numbers_are_not_saved(data: Path, tmp_path: Path) -> None:
    """The loss of a step is that before its update: the one report of this run sees nothing wrong."""
    huge = {"schedule.base_lr": 3e38, "optimizer.options.trust_coefficient": 1e6, "schedule.warmup_epochs": 0}
    huge |= {"run.checkpoint_every_steps": 1, "run.epochs": 1}
    assert "the update of step 1 left weights" in fails(alone(train_command(data, tmp_path, huge)))
    assert not list_checkpoints(tmp_path / "checkpoints")


@pytest.mark.long
def test_slow_plot_fails_no_run(data: Path, tmp_path: Path) -> None:
    job = Forked(tuple(train_command(data, tmp_path, BOUNDS)), ranks=2, target="tests.laws.ranks_slow:main")
    run(job, SLOW_PLOT_SECONDS="16")
    assert (tmp_path / "summary.json").exists()


def test_finished_run_says_so_again(data: Path, first: tuple[Path, str], finished: Path) -> None:
    again = run(alone(train_command(data, finished, KEPT))).stdout
    for name in ("result", "speed"):
        line = next(line for line in first[1].splitlines() if line.startswith(name))
        assert line in again, "the summary is the one of the run that trained"


@pytest.mark.long
def test_stalled_rank_ends_the_job_and_is_named(data: Path, tmp_path: Path) -> None:
    """A rank that lives but does not answer: stopped by SIGSTOP, found by the communication timeout."""
    log = tmp_path / "log"
    job = ForkedJob(forked(train_command(data, tmp_path / "run", {**LONG, **BOUNDS}), ranks=2), log)
    wait_until(lambda: newest_step(tmp_path / "run") >= 3, process=job, log=log)
    survivor, stalled = job.ranks
    os.kill(stalled.pid or 0, signal.SIGSTOP)
    try:
        assert exit_codes([survivor], timeout_seconds=TIMEOUT_SECONDS) == [LOST]
    finally:
        stalled.kill()
    text = log.read_text()
    # in what, depends on the moment: a sum, a report, a comparison of weights
    assert re.search(r"rank 0: \w.+ failed after [\d.]+ s; no answer from rank 1 ", text), text


@pytest.mark.long
def test_steps_of_other_images_are_not_gone_on_with(data: Path, tmp_path: Path) -> None:
    """The number of images is the same, and one is in another class: counts do not show it."""
    changed, folder = copy_of(data, tmp_path), tmp_path / "run"
    run(alone(train_command(changed, folder, {"run.epochs": 1})))
    goes_on = alone(train_command(changed, folder, {"run.epochs": 2}))
    image = sorted((changed / "train" / "disk").iterdir())[0]
    moved = changed / "train" / "ring" / image.name
    image.rename(moved)
    line = fails(goes_on)
    assert f"the training images in {changed} are not those" in line
    assert "--run.resume" in line

    checkpoint = list_checkpoints(folder / "checkpoints")[-1]
    state = load_checkpoint(checkpoint.path)
    save_checkpoint(tmp_path / "other", state, step=checkpoint.step, top1=None, keep=1)
    named = {"run.epochs": 2, "run.resume": tmp_path / "other" / checkpoint.path.name}
    assert "resumed after step 5" in run(alone(train_command(changed, tmp_path / "named", named))).stdout


@pytest.mark.long
def test_killed_rank_ends_a_torchrun_job_and_is_named(data: Path, tmp_path: Path) -> None:
    command = train_command(data, tmp_path / "run", LONG)
    launch = [sys.executable, "-m", "bigbatch", "launch", "torchrun", "--ranks", "2", "--", *command]
    log = tmp_path / "log"
    job = start(launch, log)
    wait_until(lambda: newest_step(tmp_path / "run") >= 3, process=job, log=log)
    kill_rank(job)
    assert job.wait(timeout=TIMEOUT_SECONDS) == 137
    text = log.read_text()
    assert "rank 1 was ended by SIGKILL" in text, text
    assert "Traceback" not in text, text
