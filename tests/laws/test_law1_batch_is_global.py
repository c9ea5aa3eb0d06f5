"""Law 1: a config states the global batch; ranks and accumulation only divide the work."""

from pathlib import Path

import pytest

from .jobs import (
    AUGMENTED,
    ROUNDING,
    SGD,
    alone,
    final_state,
    gradient_distance,
    mpirun,
    run,
    statistics_distance,
    step_gradients,
    train_command,
)


@pytest.fixture(scope="module")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_rank")
    run(alone(train_command(data, folder, SGD)))  # 1 rank x 4 microbatches x 8
    return folder


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, {"batch.microbatch_size": 32}),  # 4 ghost batches in one forward pass
        (2, {}),  # 2 ranks x 2 microbatches
        (2, {"comm.backend": "mpi", "comm.algorithm": "ring"}),
        (4, {"comm.group_size": 2}),  # 2 node groups x 2 ranks, hierarchical
        (4, {"comm.group_size": 2, "comm.algorithm": "sharded"}),
    ],
)
def test_any_division_gives_the_same_update(
    ranks: int, overrides: dict[str, object], data: Path, one_rank: Path, tmp_path: Path
) -> None:
    command = train_command(data, tmp_path, {**SGD, **overrides})
    run(mpirun(command, ranks=ranks) if ranks > 1 else alone(command))
    assert gradient_distance(step_gradients(tmp_path), step_gradients(one_rank)) < ROUNDING
    assert statistics_distance(final_state(tmp_path), final_state(one_rank)) < ROUNDING


def test_another_ghost_batch_is_another_run(data: Path, one_rank: Path, tmp_path: Path) -> None:
    """What the comparison above would say if ranks changed the mathematics."""
    run(alone(train_command(data, tmp_path, {**SGD, "batch.bn_span": 4})))
    assert gradient_distance(step_gradients(tmp_path), step_gradients(one_rank)) > 1000 * ROUNDING
    assert statistics_distance(final_state(tmp_path), final_state(one_rank)) > 10 * ROUNDING


@pytest.mark.parametrize("loader", ["dali", "torchvision"])
def test_augmented_and_mixed_pictures_are_those_of_the_batch(
    loader: str, data: Path, one_rank: Path, tmp_path: Path
) -> None:
    alike = {**SGD, **AUGMENTED, "data.loader": loader}
    run(alone(train_command(data, tmp_path / "1", alike)))  # 4 microbatches
    run(mpirun(train_command(data, tmp_path / "2", alike), ranks=2))  # 2 microbatches each
    assert gradient_distance(step_gradients(tmp_path / "2"), step_gradients(tmp_path / "1")) < ROUNDING
    assert statistics_distance(final_state(tmp_path / "2"), final_state(tmp_path / "1")) < ROUNDING
    assert gradient_distance(step_gradients(tmp_path / "1"), step_gradients(one_rank)) > 1000 * ROUNDING
