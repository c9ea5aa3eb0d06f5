"""What a run takes over from the checkpoint that it goes on from."""

import hashlib
from pathlib import Path

import pytest
import torch
from error_texts import naming

from bigbatch.errors import CheckpointError
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.run.checkpoint import STATE_FILE, save_checkpoint
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.resume import (
    evaluations_before,
    find_start,
    is_of,
    lacks_evaluation,
    require_same_optimizer,
    skipped_before,
)

BAD = {"train/7": "/data/train/a/7.JPEG: is empty", "val/0": "/data/val/a/\udcff.JPEG: is empty"}


@pytest.mark.parametrize(("top1", "owes"), [(None, True), (0.0, False), (0.76, False)])
def test_resume_evaluation_is_owed_by_a_checkpoint_of_this_run_alone(
    top1: float | None, owes: bool, tmp_path: Path
) -> None:
    for name in ("ours", "theirs"):
        save_checkpoint(tmp_path / name / "checkpoints", {}, step=5, top1=top1, keep=1)
    ours = RunDir(tmp_path / "ours")
    assert lacks_evaluation(ours.checkpoints / "step-00000005", run=ours) is owes
    assert lacks_evaluation(ours.checkpoints / ".." / "checkpoints" / "step-00000005", run=ours) is owes
    assert not lacks_evaluation(tmp_path / "theirs" / "checkpoints" / "step-00000005", run=ours)


def test_resume_bad_images_are_remembered_for_the_same_images_alone() -> None:
    state = {"samples": "a digest", "skipped": BAD}
    assert skipped_before(state, "a digest") == BAD
    assert skipped_before(state, "another digest") == {}
    assert skipped_before({"samples": None, "skipped": {}}, None) == {}
    assert skipped_before({}, "a digest") == {}, "as checkpoints were once"


def test_resume_accuracies_are_remembered_for_the_same_images_alone() -> None:
    records = [{"step": 2, "top1": 0.5}, {"step": 4, "top1": 0.75}]
    state = {"samples": "a digest", "evaluations": records}
    assert evaluations_before(state, "a digest") == {2: records[0], 4: records[1]}
    assert evaluations_before(state, "another digest") == {}
    assert evaluations_before({}, "a digest") == {}, "as checkpoints were once"


def test_resume_checkpoint_is_of_the_run_in_whose_folder_it_lies(tmp_path: Path) -> None:
    ours = RunDir(tmp_path / "ours")
    assert is_of(ours.path / "x" / ".." / "checkpoints" / "step-00000005", run=ours)
    assert not is_of(tmp_path / "theirs" / "checkpoints" / "step-00000005", run=ours)


def test_resume_ranks_can_tell_other_bytes_under_the_same_name(tmp_path: Path) -> None:
    """They agree on the checkpoint by path and checksum: nodes that share no disk may hold others."""
    config = load_config(["--config", "quickstart", "--run.directory", str(tmp_path)])
    starts = []
    for weight in (1.0, 2.0):
        state = {"step": 5, "config": dump_config(config), "model": {"w": torch.tensor(weight)}}
        path = save_checkpoint(RunDir(tmp_path).checkpoints, state, step=5, top1=None, keep=1)
        starts.append(find_start(config, RunDir(tmp_path), samples=None)[0])
        assert starts[-1].sha256 == hashlib.sha256((path / STATE_FILE).read_bytes()).hexdigest()
    assert starts[0].path == starts[1].path
    assert starts[0].sha256 != starts[1].sha256


@pytest.mark.parametrize(
    ("there", "here", "goes_on"),
    [
        ("lars", "lars", True),
        ("lamb", "adamw", True),
        ("adamw", "lamb", True),
        ("lars", "sgd", False),
        ("adamw", "schedulefree.AdamWScheduleFree", False),
        ("schedulefree.AdamWScheduleFree", "adamw", False),
    ],
)
def test_resume_optimizer_goes_on_from_state_of_its_kind(there: str, here: str, goes_on: bool) -> None:
    old = f"optimizer:\n  name: {there}\n"
    if goes_on:
        require_same_optimizer(old, here, path=Path("a/b"))
        return
    with pytest.raises(CheckpointError, match=naming("checkpoint a/b ", f"optimizer.name={there},", f" {here}: ")):
        require_same_optimizer(old, here, path=Path("a/b"))
