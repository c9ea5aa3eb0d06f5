"""What a run takes over from the checkpoint that it continues from."""

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from thread_controls import alone, on_ranks
from whole_states import state_of

from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import CheckpointError
from bigbatch.trainer.build.input import Splits
from bigbatch.trainer.build_run import JobRank
from bigbatch.trainer.checkpoint.checkpoint import MANIFEST_FILE, STATE_FILE, save_checkpoint
from bigbatch.trainer.checkpoint.resume import (
    ResumePoint,
    changes,
    find_start,
    require_same_objective,
    require_same_optimizer,
    start_in_memory,
)
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir
from tests.unit.trainer.checkpoint.test_checkpoint import (
    damage_bytes,
    damage_manifest,
    damage_size,
    lose_manifest,
    lose_state,
)

BAD = {"train/7": "/data/train/a/7.JPEG: is empty", "val/0": "/data/val/a/\udcff.JPEG: is empty"}


@pytest.mark.parametrize("top1", [None, 0.0])
@pytest.mark.parametrize("samples", ["a digest", "another digest"])
def test_resume_takes_over_what_is_of_this_run_and_of_the_same_images(
    top1: float | None, samples: str, tmp_path: Path
) -> None:
    """samples: the checkpoint's; the run has "a digest"."""
    evaluations = [{"step": 2, "top1": 0.5}, {"step": 4, "top1": 0.75}]
    kept = {"skipped": BAD, "evaluations": evaluations, "samples": samples}
    for name in ("ours", "theirs"):
        rundir = RunDir(tmp_path / name)
        resume = rundir.checkpoints / ".." / "checkpoints" / "step-00000005"
        config = load_config(
            ["--config", "quickstart", f"--run.directory={tmp_path / 'ours'}", f"--run.resume={resume}"]
        )
        state = state_of(config, step=5, **kept)
        save_checkpoint(rundir.checkpoints, state, step=5, top1=top1, keep=1)
        start, _ = find_start(config, RunDir(tmp_path / "ours"), samples="a digest", control=alone())
        is_known = samples != "another digest"
        assert start.is_of_other_images is not is_known
        assert start.owes_evaluation is (name == "ours" and top1 is None)
        assert start.skipped == (BAD if is_known else {})
        assert start.evaluations == ({2: evaluations[0], 4: evaluations[1]} if is_known and name == "ours" else {})


@pytest.mark.parametrize("resume", ["auto", "by name"])
def test_resume_refuses_a_checkpoint_that_counts_other_steps(resume: str, tmp_path: Path) -> None:
    """Step 4 of batch 16 is the end of an epoch of 64 images, and step 4 of batch 32 that of the second."""
    path = "auto" if resume == "auto" else str(RunDir(tmp_path).checkpoints / "step-00000004")

    def config(batch: int, samples: int) -> Config:
        words = [f"--batch.{key}={value}" for key, value in (("global_batch_size", batch), ("microbatch_size", 16))]
        words += ["--batch.bn_span=16", "--data.loader=synthetic", f"--data.num_synthetic_samples={samples}"]
        return load_config(["--config", "quickstart", f"--run.directory={tmp_path}", f"--run.resume={path}", *words])

    state = state_of(config(16, 64), step=4)
    save_checkpoint(RunDir(tmp_path).checkpoints, state, step=4, top1=None, keep=1)
    assert find_start(config(16, 64), RunDir(tmp_path), samples=None, control=alone())[0].step == 4
    for here, key in (((32, 64), "batch.global_batch_size: 32 (was 16)"), ((16, 32), "num_synthetic_samples: 32 (was")):
        with pytest.raises(CheckpointError, match=naming("step-00000004", key, "model.weights", "run.directory")):
            find_start(config(*here), RunDir(tmp_path), samples=None, control=alone())


def test_resume_from_other_images_tells_for_which_epoch_its_step_is_taken(tmp_path: Path) -> None:
    sizes = [f"--batch.{key}=32" for key in ("global_batch_size", "microbatch_size", "bn_span")]
    config = load_config(["--config", "quickstart", *sizes])
    split: Any = SimpleNamespace(num_samples=70, index=None)  # two steps of 32 in an epoch, and 6 images over
    job = JobRank(SimpleNamespace(world_size=1), None, None, None)  # type: ignore[arg-type]
    for is_other in (False, True):
        start = ResumePoint(path=tmp_path, step=5, is_of_other_images=is_other)
        lines = job.describe_placement(config, Splits(split, split), start)
        assert [bool(re.search(naming(tmp_path, "step 5", "epoch 2.50"), line)) for line in lines] == [True] * is_other


def test_resume_in_memory_refuses_images_that_changed_since_the_start() -> None:
    state = {"step": 5, "evaluations": [], "skipped": {}, "gradient_order": "w", "sums": {"ranks": "3"}}
    start = start_in_memory({**state, "samples": "a digest"}, samples="a digest", root="/data")
    assert (start.step, start.owes_evaluation, start.sums) == (5, True, {}), "no checkpoint to compare sums with"
    with pytest.raises(CheckpointError, match=naming("/data", "with which the run began", "Bring them back")):
        start_in_memory({**state, "samples": "a digest"}, samples="another digest", root="/data")


def test_resume_ranks_can_tell_other_bytes_under_the_same_name(tmp_path: Path) -> None:
    """They agree on the checkpoint by path and checksum: nodes that share no disk may hold others."""
    config = load_config(["--config", "quickstart", "--run.directory", str(tmp_path)])
    starts = []
    for weight in (1.0, 2.0):
        state = state_of(config, step=5, model={"w": torch.tensor(weight)})
        path = save_checkpoint(RunDir(tmp_path).checkpoints, state, step=5, top1=None, keep=1)
        starts.append(find_start(config, RunDir(tmp_path), samples=None, control=alone())[0])
        assert starts[-1].sha256 == hashlib.sha256((path / STATE_FILE).read_bytes()).hexdigest()
    assert starts[0].path == starts[1].path
    assert starts[0].sha256 != starts[1].sha256


def run_of(folder: Path, *steps: int) -> tuple[Config, list[Path]]:
    """A run folder's config and checkpoints."""
    config = load_config(["--config", "quickstart", "--run.directory", str(folder)])
    paths = []
    for step in steps:
        state = state_of(config, step=step, model={"w": torch.arange(5.0)})
        paths.append(save_checkpoint(RunDir(folder).checkpoints, state, step=step, top1=None, keep=9))
    return config, paths


@pytest.mark.parametrize("damage", [damage_size, damage_bytes, lose_state, lose_manifest, damage_manifest])
def test_resume_goes_on_from_the_newest_intact_checkpoint(damage: Callable[[Path], None], tmp_path: Path) -> None:
    config, paths = run_of(tmp_path, 1, 2, 3)
    damage(paths[2])
    start, state = find_start(config, RunDir(tmp_path), samples=None, control=alone())
    assert (start.path, start.step, state["step"], list(start.damaged)) == (paths[1], 2, 2, [paths[2]])
    assert str(paths[2]) in start.damaged[paths[2]]
    damage_size(paths[1])
    start, _ = find_start(config, RunDir(tmp_path), samples=None, control=alone())
    assert (start.path, list(start.damaged)) == (paths[0], [paths[2], paths[1]])


def test_resume_without_an_intact_checkpoint_does_not_begin_anew(tmp_path: Path) -> None:
    config, paths = run_of(tmp_path, 1, 2)
    for path in paths:
        damage_size(path)
    with pytest.raises(CheckpointError, match=naming(paths[1], "truncated", "none of 2", "run.directory")):
        find_start(config, RunDir(tmp_path), samples=None, control=alone())


def test_resume_takes_a_named_checkpoint_or_none(tmp_path: Path) -> None:
    config, paths = run_of(tmp_path, 1, 2)
    damage_size(paths[1])
    config = replace(config, run=replace(config.run, resume=str(paths[1])))
    with pytest.raises(CheckpointError, match=naming(paths[1], "truncated", f"another one is {paths[0]}")):
        find_start(config, RunDir(tmp_path), samples=None, control=alone())


@pytest.mark.parametrize("spoil", ["format", "read"])
def test_resume_goes_back_for_damage_alone(spoil: str, tmp_path: Path) -> None:
    """Storage that does not answer now has the checkpoint later; another version's is whole."""
    config, paths = run_of(tmp_path, 1, 2)
    manifest = paths[1] / MANIFEST_FILE
    if spoil == "format":
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    else:
        (paths[1] / STATE_FILE).unlink()
        (paths[1] / STATE_FILE).symlink_to(STATE_FILE)  # ELOOP
    with pytest.raises(CheckpointError, match=naming(paths[1])):
        find_start(config, RunDir(tmp_path), samples=None, control=alone())


def starts_of_ranks(folders: Sequence[Path]) -> list[ResumePoint]:
    """What ranks with these run folders start from."""

    def find(control: JobControl) -> ResumePoint:
        folder = folders[control.rank]
        config = load_config(["--config", "quickstart", "--run.directory", str(folder)])
        return find_start(config, RunDir(folder), samples=None, control=control)[0]

    return on_ranks(len(folders), find)


def test_resume_ranks_go_back_together(tmp_path: Path) -> None:
    """One reads other bytes than the others, as from a node's own disk, or a cache that is not up to date."""
    folders = [tmp_path / name for name in ("a", "b")]
    paths = [run_of(folder, 1, 2)[1] for folder in folders]
    damage_bytes(paths[1][1])
    starts = starts_of_ranks(folders)
    assert [start.step for start in starts] == [1, 1]
    assert [len(start.damaged) for start in starts] == [1, 1]


def test_resume_ranks_with_other_checkpoints_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """That they disagree is said where they compare what they found."""
    folders = [tmp_path / name for name in ("a", "b")]
    run_of(folders[0], 1, 2)
    assert [start.step for start in starts_of_ranks(folders)] == [2, 0]


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
    refused = naming("checkpoint a/b ", f"optimizer.name={there},", f" {here}: ")
    with nullcontext() if goes_on else pytest.raises(CheckpointError, match=refused):
        require_same_optimizer(old, here, path=Path("a/b"))


@pytest.mark.parametrize(
    ("key", "there", "others"),
    [
        ("model.frozen", "[conv1.*]", ("null", "[conv1.*, bn1.*]")),
        ("optimizer.loss", "mine.Loss", ("mine.OtherLoss",)),
        ("optimizer.loss_options", "{gamma: 2}", ("null", "{gamma: 3}")),
        ("optimizer.exclude_bias_and_norm", "true", ("false",)),
        ("optimizer.exclude_bias_and_norm", "false", ("true",)),
    ],
)
def test_resume_goes_on_with_what_was_trained_for_what(key: str, there: str, others: tuple[str, ...]) -> None:
    def config(value: str) -> Config:
        own = ["--optimizer.loss=mine.Loss", "--optimizer.label_smoothing=0"] if key != "model.frozen" else []
        return load_config(["--config", "quickstart", *own, f"--{key}={value}"])

    old = dump_config(config(there))
    require_same_objective(old, config(there), path=Path("a/b"))
    for here in others:
        with pytest.raises(CheckpointError, match=naming("checkpoint a/b ", f"{key}={there},", f"has {here}")):
            require_same_objective(old, config(here), path=Path("a/b"))
    require_same_objective("run:\n  seed: 0\n", load_config(["--config", "quickstart"]), path=Path("a/b"))


@pytest.mark.parametrize(
    ("key", "there", "here"),
    [
        ("name", "torchvision:resnet18", "timm:resnet18"),  # with weights of the same names and shapes
        ("options", "{zero_init_residual: true}", "{zero_init_residual: false}"),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "by name"])
def test_resume_refuses_another_model(key: str, there: str, here: str, resume: str, tmp_path: Path) -> None:
    def config(value: str) -> Config:
        stated = {"name": "torchvision:resnet18", "options": "null", key: value}
        words = [f"--model.{name}={word}" for name, word in stated.items()]
        path = "auto" if resume == "auto" else str(RunDir(tmp_path).checkpoints / "step-00000005")
        return load_config(["--config", "quickstart", f"--run.directory={tmp_path}", f"--run.resume={path}", *words])

    state = state_of(config(there), step=5, model={"w": torch.ones(1)})
    save_checkpoint(RunDir(tmp_path).checkpoints, state, step=5, top1=None, keep=1)
    assert find_start(config(there), RunDir(tmp_path), samples=None, control=alone())[0].step == 5
    values = (value.strip("{}").rpartition(": ")[2] for value in (there, here))
    with pytest.raises(CheckpointError, match=naming("checkpoint ", f"model.{key}", *values)):
        find_start(config(here), RunDir(tmp_path), samples=None, control=alone())


def test_changes_name_options_that_one_of_two_configs_has() -> None:
    def text(*words: str) -> str:
        return dump_config(load_config(["--config", "quickstart", *words]))

    cyclic = text("--schedule.name=cyclic", "--schedule.warmup_epochs=0", "--schedule.options.cycle_epochs=3")
    found = changes(text(), cyclic)
    assert found["schedule.options.cycle_epochs"] == "3.0 (was null)"
    assert found["schedule.options.power"] == "null (was 2.0)"
