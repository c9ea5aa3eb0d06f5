"""Law 1 in its strongest form, run.reproducible: the same bits however a run is divided."""

from pathlib import Path
from typing import Any

import pytest
from sample_images import REAL_DATA

from tests.laws.jobs import (
    alone,
    assert_identical,
    cut_back,
    fails,
    final_state,
    forked,
    mpirun,
    records,
    run,
    train_command,
)

EXACT = {
    "run.reproducible": "true",
    "batch.global_batch_size": 48,
    "batch.microbatch_size": 2,
    "batch.bn_span": 2,
    "data.loader": "torchvision",
    "comm.calibrate": "never",
    "run.metrics": "{focal: {name: tests.laws.own_score.focal, options: {gamma: 2}}}",
}
"""24 microbatches a step."""
SMALL_BUFFERS = {"comm.buffer_bytes": 20_000, "comm.threshold_bytes": 5_000}
LEARNED = ("step", "loss", "top1", "top5", "lr", "grad_norm", "grid_underflow_fraction", "metrics")


def learned(folder: Path) -> list[dict[str, Any]]:
    """What reports and evaluations say of the model."""
    found = [*records(folder, "train"), *records(folder, "eval")]
    return [{key: record[key] for key in LEARNED if key in record} for record in found]


def assert_same_run(ours: Path, theirs: Path) -> None:
    assert_identical(final_state(ours), final_state(theirs))
    assert learned(ours) == learned(theirs)
    assert all(record["grid_underflow_fraction"] is not None for record in records(ours, "train"))


@pytest.fixture(scope="module")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_rank")
    run(alone(train_command(data, folder, EXACT)))
    return folder


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (4, {"comm.group_size": 2}),  # 2 nodes
        (3, {"comm.algorithm": "ring", **SMALL_BUFFERS}),
        pytest.param(2, {"data.loader": "dali"}, marks=pytest.mark.long),
        pytest.param(8, {"comm.group_size": 1, "comm.algorithm": "doubling"}, marks=pytest.mark.long),
        pytest.param(8, {"comm.group_size": 4, "comm.algorithm": "sharded"}, marks=pytest.mark.long),
        pytest.param(6, {"comm.algorithm": "auto", "comm.calibrate": "always"}, marks=pytest.mark.long),
        pytest.param(4, {"comm.backend": "gloo", "comm.algorithm": "native"}, marks=pytest.mark.long),
        pytest.param(2, {"comm.backend": "mpi", "comm.buffer_bytes": 50_000}, marks=pytest.mark.long),
    ],
)
def test_any_division_gives_the_same_bits(
    ranks: int, overrides: dict[str, object], data: Path, one_rank: Path, tmp_path: Path
) -> None:
    command = train_command(data, tmp_path, {**EXACT, **overrides})
    run(mpirun(command, ranks=ranks) if overrides.get("comm.backend") == "mpi" else forked(command, ranks=ranks))
    assert_same_run(tmp_path, one_rank)


@pytest.mark.long
def test_without_the_setting_the_bits_differ(data: Path, tmp_path: Path) -> None:
    """What the comparison above would say of sums that round."""
    for ranks in (1, 2):
        run(forked(train_command(data, tmp_path / str(ranks), {**EXACT, "run.reproducible": "false"}), ranks=ranks))
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_same_run(tmp_path / "1", tmp_path / "2")


HALF = {
    "optimizer.precision": "fp16",
    "optimizer.loss_scale": 1024,
    "optimizer.loss_scale_growth_steps": 2,
    "optimizer.ema_decay": 0.9,
    "optimizer.ema_every_steps": 1,
    "augment.mixup_alpha": 0.2,
    "augment.color_jitter": 0.4,
    "model.whitening_eps": 5e-4,
}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_and_all_that_follows_the_weights(precision: str, data: Path, tmp_path: Path) -> None:
    overrides = {**EXACT, **HALF}
    if precision == "bf16":
        overrides = {key: value for key, value in overrides.items() if "loss_scale" not in key}
    for ranks in (1, 4):
        command = train_command(data, tmp_path / str(ranks), {**overrides, "optimizer.precision": precision})
        run(forked(command, ranks=ranks))
    assert_same_run(tmp_path / "4", tmp_path / "1")


@pytest.mark.long
def test_seven_ranks_and_several_ghost_batches_in_a_microbatch(data: Path, tmp_path: Path) -> None:
    for ranks in (1, 2, 7):
        overrides = {**EXACT, "batch.global_batch_size": 56, "batch.microbatch_size": 4}
        run(forked(train_command(data, tmp_path / str(ranks), overrides), ranks=ranks))
    assert_same_run(tmp_path / "2", tmp_path / "1")
    assert_same_run(tmp_path / "7", tmp_path / "1")


@pytest.mark.long
def test_resumed_by_other_ranks_with_another_algorithm(data: Path, tmp_path: Path) -> None:
    kept = {**EXACT, "run.checkpoint_every_steps": 1, "run.keep_checkpoints": 100}
    run(forked(train_command(data, tmp_path / "whole", kept), ranks=4))
    cut_back(tmp_path / "whole", tmp_path / "resumed", num_checkpoints=2)
    others = {**kept, "comm.algorithm": "doubling", **SMALL_BUFFERS}
    done = run(forked(train_command(data, tmp_path / "resumed", others), ranks=3))
    assert "comm.algorithm=doubling (was hierarchical)" in done.stdout
    assert "another way than in the checkpoint" not in done.stdout, "it keeps the last bits"
    assert_identical(final_state(tmp_path / "resumed"), final_state(tmp_path / "whole"))
    assert learned(tmp_path / "resumed")[-1] == learned(tmp_path / "whole")[-1]


@pytest.mark.long
@pytest.mark.skipif(not REAL_DATA.exists(), reason=f"no real pictures at {REAL_DATA}")
def test_resnet18_on_real_pictures(tmp_path: Path) -> None:
    overrides = {
        **EXACT,
        "model.name": "resnet18",
        "model.width": "null",
        "data.image_size": 64,
        "data.num_classes": len(list((REAL_DATA / "train").iterdir())),
        "data.crop": "resized",
        "run.epochs": 1,
    }
    for ranks in (1, 8):
        run(forked(train_command(REAL_DATA, tmp_path / str(ranks), overrides), ranks=ranks))
    assert_same_run(tmp_path / "8", tmp_path / "1")


@pytest.mark.long
def test_statistics_beyond_the_grid_are_named(data: Path, tmp_path: Path) -> None:
    said = fails(forked(train_command(data, tmp_path, {**EXACT, "data.std": "[1e-6,1e-6,1e-6]"}), ranks=2))
    assert "means or variances of microbatches were too large" in said
    assert "run.reproducible" in said


def test_gradient_beyond_the_grid_is_named(data: Path, tmp_path: Path) -> None:
    said = fails(forked(train_command(data, tmp_path, {**EXACT, "schedule.base_lr": 2e9}), ranks=2))
    assert "larger than 170.667" in said
    assert "run.reproducible" in said
    assert "lower schedule.base_lr" in said
