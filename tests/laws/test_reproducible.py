"""Law 1 in its strongest form, run.reproducible: the same bits however a run is divided."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sample_images import REAL_DATA
from torch import Tensor

from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import (
    alone,
    assert_identical,
    cut_back,
    fails,
    final_state,
    forked,
    mpirun,
    newest_step,
    records,
    run,
    train_command,
)

EXACT = {
    "run.epochs": 1,
    "run.reproducible": "true",
    "batch.global_batch_size": 48,
    "batch.microbatch_size": 2,
    "batch.bn_span": 2,
    "data.loader": "torchvision",
    "run.noise_scale_every_steps": 1,
    "run.metrics": "{focal: {name: tests.laws.own_score.focal, options: {gamma: 2}}}",
}
"""Three steps of 24 microbatches."""
SMALL_BUFFERS = {"comm.buffer_bytes": 20_000, "comm.threshold_bytes": 5_000}
NOISE = ("microbatch_squared_norm", "global_squared_norm", "noise_scale", "noise_scale_low", "noise_scale_high")
LEARNED = ("step", "loss", "top1", "top5", "lr", "grad_norm", "grid_underflow_fraction", "metrics", *NOISE)


def learned(folder: Path) -> list[dict[str, Any]]:
    """What reports and evaluations say of the model."""
    found = [*records(folder, "noise"), *records(folder, "train"), *records(folder, "eval")]
    return [{key: record[key] for key in LEARNED if key in record} for record in found]


def whole_state(folder: Path) -> dict[str, Tensor]:
    """final_state, with the average of the weights, and the loss scale."""
    state = load_checkpoint(list_checkpoints(folder / "checkpoints")[-1].path)
    average = {f"average/{name}": value for name, value in state["average"].items()}
    scale = {f"precision/{name}": torch.tensor(value) for name, value in state["precision"].items()}
    return {**final_state(folder), **average, **scale}


def assert_same_run(ours: Path, theirs: Path) -> None:
    assert_identical(whole_state(ours), whole_state(theirs))
    assert learned(ours) == learned(theirs)
    assert len(records(ours, "noise")) == len(records(ours, "train")) > 1
    assert all(record["grid_underflow_fraction"] is not None for record in records(ours, "train"))


@pytest.fixture(scope="module")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_rank")
    run(alone(train_command(data, folder, EXACT)))
    return folder


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (5, {"comm.algorithm": "ring", **SMALL_BUFFERS}),  # four ranks x 5 microbatches, and one x 4
        pytest.param(4, {"comm.group_size": 2, "comm.algorithm": "sharded"}, marks=pytest.mark.long),  # 2 nodes
        pytest.param(3, {"comm.backend": "gloo", "comm.algorithm": "native"}, marks=pytest.mark.long),
        pytest.param(2, {"comm.backend": "mpi", "data.loader": "dali"}, marks=pytest.mark.long),
    ],
)
def test_any_division_gives_the_same_bits(
    ranks: int, overrides: dict[str, object], data: Path, one_rank: Path, tmp_path: Path
) -> None:
    command = train_command(data, tmp_path, {**EXACT, **overrides})
    run(mpirun(command, ranks=ranks) if overrides.get("comm.backend") == "mpi" else forked(command, ranks=ranks))
    assert_same_run(tmp_path, one_rank)


ADAPTIVE = {"optimizer.options.betas": "[0.9,0.99]", "optimizer.options.eps": 1e-6, "schedule.base_lr": 0.01}
MUON = {"optimizer.name": "muon", "schedule.base_lr": 0.02, "schedule.end_lr": 0.0}
SHAMPOO = {**MUON, "optimizer.name": "shampoo", "optimizer.options.eps": 1e-4, "optimizer.options.root_every_steps": 2}


RESIDENT = {"data.loader": "resident", "data.crop": "padded", "data.crop_area_min": "null"}
AVERAGED = {"optimizer.ema_decay": 0.9, "optimizer.ema_every_steps": 1}


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [{**RESIDENT, **AVERAGED}, {"model.name": "tests.laws.foreign_models.WithAttention"}],
    ids=["resident", "attention"],
)
def test_with_another_loader_and_model(overrides: dict[str, object], data: Path, tmp_path: Path) -> None:
    if overrides.get("data.loader") == "resident":  # which takes images of the model's own size
        data = tmp_path / "shapes"
        write_dataset(data, train_per_class=16, val_per_class=7, side_pixels=(32, 32))
    for ranks in (1, 3):
        command = train_command(data, tmp_path / str(ranks), {**EXACT, **overrides})
        run(forked(command, ranks=ranks))
    assert_same_run(tmp_path / "3", tmp_path / "1")


SHARDED = {"optimizer.sharded": "true"}


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        ((2, 3), {}),
        pytest.param((1, 3), SHAMPOO, marks=pytest.mark.long),
        pytest.param((1, 4), {"optimizer.name": "lamb", **ADAPTIVE}, marks=pytest.mark.long),
        pytest.param(
            (1, 4),
            {"optimizer.precision": "fp16", "optimizer.loss_scale": 1024, "optimizer.clip_norm": 0.5, **SMALL_BUFFERS},
            marks=pytest.mark.long,
        ),
    ],
)
def test_sharded_update_has_the_same_bits_on_any_number_of_ranks(
    ranks: tuple[int, int], overrides: dict[str, object], data: Path, tmp_path: Path
) -> None:
    """Norms of LARS, LAMB and clipping, and matrices, are of pieces that depend on the ranks."""
    for count in ranks:
        command = train_command(data, tmp_path / str(count), {**EXACT, **SHARDED, **overrides})
        run(forked(command, ranks=count))
    one, other = (tmp_path / str(count) for count in ranks)
    assert_same_run(other, one)


@pytest.mark.long
def test_without_the_setting_the_bits_differ(data: Path, tmp_path: Path) -> None:
    """What the comparison above would say of sums that round."""
    settings = {**EXACT, "run.reproducible": "false"}
    for ranks in (1, 2):
        run(forked(train_command(data, tmp_path / str(ranks), settings), ranks=ranks))
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
    "model.options.whitening_eps": 5e-4,
}


@pytest.mark.long
def test_half_precision_and_all_that_follows_the_weights(data: Path, tmp_path: Path) -> None:
    for ranks in (1, 3):
        run(forked(train_command(data, tmp_path / str(ranks), {**EXACT, **HALF}), ranks=ranks))
    assert any(name.startswith("average/") for name in whole_state(tmp_path / "1"))
    assert_same_run(tmp_path / "3", tmp_path / "1")


@pytest.mark.long
def test_matrices_that_ranks_share_out(data: Path, tmp_path: Path) -> None:
    for ranks in (1, 3):
        run(forked(train_command(data, tmp_path / str(ranks), {**EXACT, **MUON}), ranks=ranks))
    assert_same_run(tmp_path / "3", tmp_path / "1")


@pytest.mark.long
def test_several_ghost_batches_in_a_microbatch(data: Path, tmp_path: Path) -> None:
    for ranks in (1, 5):  # 12 microbatches: two ranks x 3, three x 2
        overrides = {**EXACT, "batch.microbatch_size": 4}
        run(forked(train_command(data, tmp_path / str(ranks), overrides), ranks=ranks))
    assert_same_run(tmp_path / "5", tmp_path / "1")


@pytest.mark.long
def test_resumed_by_other_ranks_with_another_algorithm(data: Path, tmp_path: Path) -> None:
    kept = {**EXACT, "run.checkpoint_every_steps": 1, "run.keep_checkpoints": 100}
    run(forked(train_command(data, tmp_path / "whole", kept), ranks=2))
    cut_back(tmp_path / "whole", tmp_path / "resumed", num_checkpoints=2)
    others = {**kept, "comm.algorithm": "doubling", **SMALL_BUFFERS}
    done = run(forked(train_command(data, tmp_path / "resumed", others), ranks=3))
    assert "comm.algorithm=doubling (was hierarchical)" in done.stdout
    assert "another way than in the checkpoint" not in done.stdout, "it keeps the last bits"
    assert_identical(final_state(tmp_path / "resumed"), final_state(tmp_path / "whole"))
    assert learned(tmp_path / "resumed")[-1] == learned(tmp_path / "whole")[-1]


@pytest.mark.long
def test_healed_at_another_size(data: Path, tmp_path: Path) -> None:
    """One of 4 ranks dies in the middle of a step; 3 continue from the last checkpoint."""
    losing = {"optimizer.loss": "tests.parallel.losing_loss.loss", "optimizer.label_smoothing": 0}
    kept = {**EXACT, "run.epochs": 2, **losing, **SHARDED, "run.checkpoint_every_steps": 1}
    run(forked(train_command(data, tmp_path / "whole", kept), ranks=2))
    healed = tmp_path / "healed"
    command = train_command(data, healed, kept)
    run(forked(command, ranks=4), expect=None, LOSE_RUN=str(healed), LOSE_AFTER="2")
    assert 2 <= newest_step(healed) < newest_step(tmp_path / "whole")
    done = run(forked(command, ranks=3))
    assert "resumed after step" in done.stdout
    assert_identical(whole_state(healed), whole_state(tmp_path / "whole"))
    assert learned(healed)[-1] == learned(tmp_path / "whole")[-1]


@pytest.mark.long
@pytest.mark.weekly
@pytest.mark.skipif(not REAL_DATA.exists(), reason=f"no real images at {REAL_DATA}")
def test_resnet18_on_real_images(tmp_path: Path) -> None:
    overrides = {
        **EXACT,
        **dict.fromkeys(("batch.microbatch_size", "batch.bn_span"), 6),  # each microbatch sums 11.7 million weights
        "model.name": "resnet18",
        "data.image_size": 64,
        "data.num_classes": len(list((REAL_DATA / "train").iterdir())),
        "data.crop": "resized",
    }
    for ranks in (1, 8):
        run(forked(train_command(REAL_DATA, tmp_path / str(ranks), overrides), ranks=ranks))
    assert_same_run(tmp_path / "8", tmp_path / "1")


@pytest.mark.long
def test_statistics_beyond_the_grid_are_named(data: Path, tmp_path: Path) -> None:
    said = fails(forked(train_command(data, tmp_path, {**EXACT, "data.std": "[1e-6,1e-6,1e-6]"}), ranks=2))
    assert "means or variances of microbatches were too large" in said
    assert "run.reproducible" in said


@pytest.mark.parametrize("overrides", [{}, pytest.param(SHARDED, marks=pytest.mark.long)])
def test_gradient_beyond_the_grid_is_named(overrides: dict[str, object], data: Path, tmp_path: Path) -> None:
    command = train_command(data, tmp_path, {**EXACT, "run.epochs": 2, "schedule.base_lr": 2e9, **overrides})
    said = fails(forked(command, ranks=2))
    assert "larger than 170.667" in said
    assert "run.reproducible" in said
    assert "lower schedule.base_lr" in said
