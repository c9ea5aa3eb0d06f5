"""Law 7 for the input: an unreadable image ends a run without loss, and skipped images are reported."""

import json
import os
import shutil
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import bigbatch

from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.input.order import epoch_order, read_index
from tests.laws.jobs import (
    NUM_CLASSES,
    ROUNDING,
    SGD,
    TIMEOUT_SECONDS,
    TRAIN_PER_CLASS,
    Forked,
    alone,
    assert_identical,
    copy_of,
    cut_back,
    fails,
    final_state,
    forked,
    gradient_distance,
    held,
    message,
    newest_step,
    only_message,
    records,
    run,
    start,
    step_gradients,
    steps,
    train_command,
    wait_until,
)

SEED, GLOBAL_BATCH, STEPS_PER_EPOCH = 0, 32, 5
NUM_SAMPLES = NUM_CLASSES * TRAIN_PER_CLASS


def image_of(data: Path, *, epoch: int, step: int, rank: int, number: int = 0) -> Path:
    """What a rank of two trains on at a step of an epoch."""
    order_N = epoch_order(seed=SEED, epoch=epoch, num_samples=NUM_SAMPLES)
    position = order_N[step * GLOBAL_BATCH + rank * (GLOBAL_BATCH // 2) + number]
    return Path(read_index(data, "train").name(int(position)))


def only_decoding_tells(path: Path) -> None:
    """Impossible Huffman code lengths: the frame header and the end marker stay."""
    data = bytearray(path.read_bytes())
    table = data.index(b"\xff\xc4") + 5
    data[table : table + 16] = b"\xff" * 16
    path.write_bytes(data)


def no_image(path: Path) -> None:
    path.write_bytes(b"no image")


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads(RunDir(folder).summary.read_text()))


@pytest.mark.long
def test_data_that_go_away_change_no_bit(data: Path, tmp_path: Path) -> None:
    """Taken away in mid-run and brought back: the same command continues after the last whole step."""
    moving, epochs = copy_of(data, tmp_path), 4
    whole, broken, go_on = tmp_path / "whole", tmp_path / "broken", tmp_path / "go_on"
    overrides = {
        "data.loader": "dali",
        "data.patience_seconds": 5,
        "run.epochs": epochs,
        "run.eval_every_epochs": epochs,
        "run.log_every_steps": 3,
        **held(broken, reports=3, until=go_on),
    }
    go_on.touch()
    run(forked(train_command(moving, whole, overrides), ranks=2))

    go_on.unlink()
    command = forked(train_command(moving, broken, overrides), ranks=2)
    log = tmp_path / "broken.log"
    process = start(command, log)
    wait_until(lambda: len(steps(broken)) >= 3, process=process, log=log)
    (moving / "train").rename(tmp_path / "away")
    go_on.touch()
    assert process.wait(timeout=TIMEOUT_SECONDS) != 0
    done = newest_step(broken)
    assert 9 <= done < epochs * STEPS_PER_EPOCH
    line = only_message(log.read_text())
    assert f"{moving}/train/" in line
    assert f"The run stopped after step {done}." in line
    assert f"\nthe same command continues from step {done}\n" in log.read_text()
    assert steps(broken) == list(range(3, done + 1, 3)), "no report tells of steps that were none"

    (tmp_path / "away").rename(moving / "train")
    assert f"resumed after step {done}" in run(command).stdout
    assert_identical(final_state(broken), final_state(whole))
    assert steps(broken) == steps(whole)


@pytest.mark.parametrize("every_epochs", [1, pytest.param(2, marks=pytest.mark.long)], ids=["in mid-run", "at the end"])
def test_evaluation_that_fails_is_made_up_for(every_epochs: int, data: Path, tmp_path: Path) -> None:
    damaged, whole, broken = copy_of(data, tmp_path), tmp_path / "whole", tmp_path / "broken"
    overrides = {"run.eval_every_epochs": every_epochs}
    done = every_epochs * STEPS_PER_EPOCH
    run(forked(train_command(data, whole, overrides), ranks=2))
    victim = sorted((damaged / "val").glob("*/*"))[60]
    image = victim.read_bytes()
    no_image(victim)
    command = forked(train_command(damaged, broken, overrides), ranks=2)
    assert str(victim) in fails(command)
    assert newest_step(broken) == steps(broken)[-1] == done
    assert records(broken, "eval") == []
    victim.write_bytes(image)
    assert f"resumed after step {done}" in run(command).stdout
    assert_identical(final_state(broken), final_state(whole))
    found, expected = ([(r["step"], r["top1"]) for r in records(folder, "eval")] for folder in (broken, whole))
    assert found == expected
    kept, wanted = ([(c.step, c.top1) for c in list_checkpoints(f / "checkpoints")] for f in (broken, whole))
    assert kept == wanted, "each evaluated checkpoint has its accuracy"
    ours, theirs = summary(broken), summary(whole)
    for name in ("top1", "top5", "best_top1"):
        assert ours[name] == theirs[name]


def test_bad_image_is_skipped_alike_by_any_ranks(data: Path, tmp_path: Path) -> None:
    damaged = copy_of(data, tmp_path)
    victim = image_of(damaged, epoch=0, step=2, rank=1)
    only_decoding_tells(victim)
    key = f"train/{sorted((damaged / 'train').glob('*/*')).index(victim)}"
    command = train_command(damaged, tmp_path / "1", {**SGD, "data.max_skipped": 3})
    run(alone(command))
    run(forked([*command, f"--run.directory={tmp_path / '2'}"], ranks=2))
    assert gradient_distance(step_gradients(tmp_path / "2"), step_gradients(tmp_path / "1")) < ROUNDING
    for folder in (tmp_path / "1", tmp_path / "2"):
        told = summary(folder)
        assert told["skipped_images"] == len(told["skipped"]) == 1
        assert told["skipped"][0].startswith(f"{victim}: ")
        (record,) = records(folder, "skipped")
        stamps = {name: record[name] for name in ("time", "elapsed_seconds")}
        assert record == {"kind": "skipped", **stamps, "step": 3, "images": {key: told["skipped"][0]}}


@pytest.mark.long
def test_resumed_run_remembers_what_was_skipped(data: Path, tmp_path: Path) -> None:
    """It continues where only steps are left that do not meet the image again."""
    damaged, whole, resumed = copy_of(data, tmp_path), tmp_path / "whole", tmp_path / "resumed"
    last_step = {"epoch": 1, "step": STEPS_PER_EPOCH - 1}
    left = {image_of(damaged, **last_step, rank=0, number=number) for number in range(GLOBAL_BATCH)}
    victim = next(path for path in sorted((damaged / "train").glob("*/*")) if path not in left)
    no_image(victim)
    overrides = {"data.max_skipped": 3, "run.checkpoint_every_steps": 1, "run.keep_checkpoints": 100}
    run(forked(train_command(damaged, whole, overrides), ranks=2))
    assert cut_back(whole, resumed, num_checkpoints=9) == 9
    done = run(forked(train_command(damaged, resumed, overrides), ranks=2))
    assert "resumed after step 9" in done.stdout
    assert "skipped: " not in done.stdout.partition("resumed after")[2].partition("skipped_images")[0]
    assert_identical(final_state(resumed), final_state(whole))
    assert summary(resumed)["skipped"] == summary(whole)["skipped"]
    assert summary(resumed)["skipped_images"] == 1
    assert records(resumed, "skipped") == records(whole, "skipped")


@pytest.mark.long
def test_skipped_image_is_the_same_one_after_a_move(data: Path, tmp_path: Path) -> None:
    """Data and run are moved, and the run continues in another folder: each epoch meets the image again."""
    damaged, moved = copy_of(data, tmp_path), tmp_path / "moved"
    here, there = tmp_path / "here", tmp_path / "there"
    victim = image_of(damaged, epoch=0, step=2, rank=0)
    no_image(victim)
    overrides = {"data.max_skipped": 1, "data.loader": "torchvision"}
    run(alone(train_command(damaged, here, {**overrides, "run.epochs": 1})))
    checkpoint = shutil.copytree(list_checkpoints(here / "checkpoints")[-1].path, tmp_path / "step-00000005")
    damaged.rename(moved)
    for folder, resume in ((here, "auto"), (there, checkpoint)):
        done = run(alone(train_command(moved, folder, {**overrides, "run.resume": resume})))
        assert "resumed after step 5\n" in done.stdout
        assert [reason.partition(": ")[0] for reason in summary(folder)["skipped"]] == [str(victim)]


def bigbatch_on_strict_streams(*command: str) -> int:
    """What each rank runs."""
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="strict")
    return bigbatch(*command)


@pytest.mark.long
def test_names_that_are_no_text_can_be_told(data: Path, tmp_path: Path) -> None:
    """Bad images of both splits are named, by any rank, on streams that accept only UTF-8."""
    damaged = copy_of(data, tmp_path)

    def strict(command: list[str]) -> Forked:
        return Forked(tuple(command), ranks=2, target="tests.laws.test_law7_input:bigbatch_on_strict_streams")

    for split in ("train", "val"):
        first = sorted((damaged / split).glob("*/*"))[0]
        no_image(first.rename(first.with_name(os.fsdecode(b"0\xff.jpg"))))
    overrides = {"data.loader": "torchvision", "run.eval_every_epochs": 1}
    done = run(strict(train_command(damaged, tmp_path / "1", {**overrides, "data.max_skipped": 2})))
    told = [line for line in done.stdout.splitlines() if line.startswith("skipped: ") and "/0\\udcff.jpg: " in line]
    assert len(told) == 2
    next((damaged / "train").glob("*/0*\udcff*")).unlink()
    line = fails(strict(train_command(damaged, tmp_path / "2", {**overrides, "run.epochs": 1})))
    assert "/0\\udcff.jpg: is not an image" in line


def test_more_bad_images_than_may_be_skipped(data: Path, tmp_path: Path) -> None:
    damaged, folder = copy_of(data, tmp_path), tmp_path / "run"
    victims = [image_of(damaged, epoch=0, step=2 + rank, rank=rank) for rank in range(2)]
    for victim in victims:
        no_image(victim)
    overrides = {"data.max_skipped": 1, "data.loader": "torchvision"}
    line = message(run(forked(train_command(damaged, folder, overrides), ranks=2), expect=1))
    assert "2 images are bad, and data.max_skipped=1" in line
    assert any(str(victim) in line for victim in victims)
    stopped = newest_step(folder)
    assert stopped in (3, 4)
    done = run(forked(train_command(damaged, folder, {**overrides, "data.max_skipped": 2}), ranks=2))
    assert f"resumed after step {stopped}\n" in done.stdout
    assert sorted(line.partition(": ")[0] for line in summary(folder)["skipped"]) == sorted(map(str, victims))


@pytest.mark.long
def test_packed_and_staged_copies_are_the_same_data(data: Path, tmp_path: Path) -> None:
    packed, local = tmp_path / "packed", tmp_path / "local"
    pack(data, packed, recipe=PackRecipe())

    def trained(root: Path, name: str, **overrides: object) -> str:
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        return run(forked(train_command(root, tmp_path / name, keys), ranks=2)).stdout

    trained(data, "folders")
    trained(data, "moved", run__epochs=1)
    said = trained(packed, "moved", data__stage=local)
    assert "GB copied in" in said
    assert "resumed after step 5" in said
    assert_identical(final_state(tmp_path / "moved"), final_state(tmp_path / "folders"))
