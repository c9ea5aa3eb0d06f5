"""What a run takes over from the checkpoint that it goes on from."""

from pathlib import Path

import pytest

from bigbatch.trainer.checkpoint import save_checkpoint
from bigbatch.trainer.resume import lacks_evaluation, skipped_before
from bigbatch.trainer.rundir import RunDir

BAD = {"train/7": "/data/train/a/7.JPEG: is empty", "val/0": "/data/val/a/\udcff.JPEG: is empty"}


@pytest.mark.parametrize(("top1", "owes"), [(None, True), (0.0, False), (0.76, False)])
def test_evaluation_is_owed_by_a_checkpoint_of_this_run_alone(top1: float | None, owes: bool, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        save_checkpoint(tmp_path / name / "checkpoints", {}, step=5, top1=top1, keep=1)
    ours = RunDir(tmp_path / "ours")
    assert lacks_evaluation(ours.checkpoints / "step-00000005", run=ours) is owes
    assert lacks_evaluation(ours.checkpoints / ".." / "checkpoints" / "step-00000005", run=ours) is owes
    assert not lacks_evaluation(tmp_path / "theirs" / "checkpoints" / "step-00000005", run=ours)


def test_bad_pictures_are_remembered_for_the_same_pictures_alone() -> None:
    state = {"samples": "a digest", "skipped": BAD}
    assert skipped_before(state, "a digest") == BAD
    assert skipped_before(state, "another digest") == {}
    assert skipped_before({"samples": None, "skipped": {}}, None) == {}
    assert skipped_before({}, "a digest") == {}, "as checkpoints were once"
