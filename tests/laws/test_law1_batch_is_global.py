"""Law 1: a config states the global batch; ranks and accumulation only divide the work."""

from pathlib import Path

import pytest

from tests.laws.jobs import (
    AUGMENTED,
    ROUNDING,
    SGD,
    alone,
    final_state,
    forked,
    gradient_distance,
    records,
    run,
    statistics_distance,
    step_gradients,
    train_command,
)

NOISE = {"run.noise_scale_every_steps": 1}


@pytest.fixture(scope="module")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_rank")
    run(alone(train_command(data, folder, {**SGD, **NOISE})))  # 1 rank x 4 microbatches x 8
    return folder


def noise_distance(folder: Path, reference: Path, *, num_steps: int | None = None) -> float:
    """How far apart what two runs measured in the first steps is, at most, relative to the norm itself."""
    ours, theirs = records(folder, "noise"), records(reference, "noise")
    assert [each["step"] for each in ours] == [each["step"] for each in theirs] == list(range(1, len(ours) + 1))
    assert len(ours) > 1
    names = ("microbatch_squared_norm", "global_squared_norm")
    pairs = list(zip(ours, theirs, strict=True))[:num_steps]
    return max(abs(a[name] / b[name] - 1) for a, b in pairs for name in names)


@pytest.mark.parametrize(
    ("ranks", "overrides", "tolerance"),
    [
        (3, {"optimizer.sharded": "true"}, ROUNDING),  # 2, 1 and 1 of 4 microbatches
        # activations and gradients are rounded: some other kernels, and norms of tensors that noise makes
        pytest.param(2, {"optimizer.precision": "fp16", "optimizer.loss_scale": 128}, 0.1, marks=pytest.mark.long),
        pytest.param(2, {"optimizer.precision": "bf16", "optimizer.sharded": "true"}, 0.3, marks=pytest.mark.long),
    ],
)
def test_any_division_measures_the_same_noise(
    ranks: int, overrides: dict[str, object], tolerance: float, data: Path, one_rank: Path, tmp_path: Path
) -> None:
    run(forked(train_command(data, tmp_path, {**SGD, **NOISE, **overrides}), ranks=ranks))
    assert noise_distance(tmp_path, one_rank) < tolerance


@pytest.mark.long
def test_noise_is_measured_before_gradients_are_clipped(data: Path, one_rank: Path, tmp_path: Path) -> None:
    """In the first step, after which a clipped update leads to other weights."""
    run(alone(train_command(data, tmp_path, {**SGD, **NOISE, "optimizer.clip_norm": 1e-3})))
    assert noise_distance(tmp_path, one_rank, num_steps=1) < ROUNDING
    assert noise_distance(tmp_path, one_rank) > 100 * ROUNDING


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, {"batch.microbatch_size": 32}),  # 4 ghost batches in one forward pass
        (3, {}),  # 2, 1 and 1 microbatches
        (4, {"comm.group_size": 2}),  # 2 node groups x 2 ranks, hierarchical
    ],
)
def test_any_division_gives_the_same_update(
    ranks: int, overrides: dict[str, object], data: Path, one_rank: Path, tmp_path: Path
) -> None:
    run(forked(train_command(data, tmp_path, {**SGD, **overrides}), ranks=ranks))
    assert gradient_distance(step_gradients(tmp_path), step_gradients(one_rank)) < ROUNDING
    assert statistics_distance(final_state(tmp_path), final_state(one_rank)) < ROUNDING


def test_another_ghost_batch_is_another_run(data: Path, one_rank: Path, tmp_path: Path) -> None:
    """The comparison above detects ranks that change the mathematics."""
    run(alone(train_command(data, tmp_path, {**SGD, "batch.bn_span": 4})))
    assert gradient_distance(step_gradients(tmp_path), step_gradients(one_rank)) > 1000 * ROUNDING
    assert statistics_distance(final_state(tmp_path), final_state(one_rank)) > 10 * ROUNDING


@pytest.mark.parametrize("loader", [pytest.param("dali", marks=pytest.mark.long), "torchvision"])
def test_augmented_and_mixed_images_are_those_of_the_batch(
    loader: str, data: Path, one_rank: Path, tmp_path: Path
) -> None:
    alike = {**SGD, **AUGMENTED, "run.epochs": 2, "data.loader": loader}  # of two image sizes
    run(alone(train_command(data, tmp_path / "1", alike)))  # 4 microbatches
    run(forked(train_command(data, tmp_path / "2", alike), ranks=2))  # 2 microbatches each
    assert gradient_distance(step_gradients(tmp_path / "2"), step_gradients(tmp_path / "1")) < ROUNDING
    assert statistics_distance(final_state(tmp_path / "2"), final_state(tmp_path / "1")) < ROUNDING
    assert gradient_distance(step_gradients(tmp_path / "1")[:5], step_gradients(one_rank)) > 1000 * ROUNDING


WIDE = {**SGD, "run.epochs": 3, "batch.global_batch_size": 64, "batch.bn_span": 32}
"""2 ghost batches a step, each as large as four ranks' microbatches.

The moments of a ghost batch over ranks are rounded otherwise, which moves a ReLU's decision in about every third step:
6 steps, of which the nearest must agree. Another ghost batch is another gradient in all of them.
"""


@pytest.fixture(scope="module")
def one_rank_wide(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_rank_wide")
    run(alone(train_command(data, folder, {**WIDE, "batch.microbatch_size": 32})))
    return folder


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(2, {"batch.microbatch_size": 16}, marks=pytest.mark.long),  # 1 group x 2 ranks x 2 microbatches
        (4, {"batch.microbatch_size": 8, "comm.group_size": 2}),  # one group of 4 ranks, over 2 node groups
    ],
)
def test_a_ghost_batch_may_lie_on_several_ranks(
    ranks: int, overrides: dict[str, object], data: Path, one_rank_wide: Path, tmp_path: Path
) -> None:
    done = run(forked(train_command(data, tmp_path, {**WIDE, **overrides}), ranks=ranks))
    assert gradient_distance(step_gradients(tmp_path), step_gradients(one_rank_wide), choose=min) < ROUNDING
    assert statistics_distance(final_state(tmp_path), final_state(one_rank_wide)) < ROUNDING
    assert f"batch-norm span 32 over {32 // int(str(overrides['batch.microbatch_size']))} ranks" in done.stdout


def test_ghost_batches_that_end_at_the_rank_are_another_run(data: Path, one_rank_wide: Path, tmp_path: Path) -> None:
    """The comparison above detects ranks of a group that do not exchange statistics."""
    run(forked(train_command(data, tmp_path, {**WIDE, "batch.microbatch_size": 16, "batch.bn_span": 16}), ranks=2))
    assert gradient_distance(step_gradients(tmp_path), step_gradients(one_rank_wide), choose=min) > 1000 * ROUNDING
    assert statistics_distance(final_state(tmp_path), final_state(one_rank_wide)) > 10 * ROUNDING
