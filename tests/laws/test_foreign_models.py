"""Laws 1, 2 and 4 for models of other packages, one with batch norm and one without, and for one of timm's."""

import importlib
from pathlib import Path

import pytest
import torch

from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from tests.laws.jobs import (
    ROUNDING,
    SGD,
    alone,
    assert_identical,
    cut_back,
    final_state,
    forked,
    gradient_distance,
    run,
    statistics_distance,
    step_gradients,
    train_command,
)

TIMM = "timm:test_resnet"
"""With all that its ResNets have, and 374,000 weights."""
NORMED, ATTENTION, COMPUTED = (
    f"tests.laws.foreign_models.{name}" for name in ("WithBatchNorm", "WithAttention", "WithComputedWeights")
)


def settings(name: str, **changes: object) -> dict[str, object]:
    return {**SGD, "model.name": name, **{key.replace("__", "."): value for key, value in changes.items()}}


@pytest.fixture(
    scope="module",
    params=[NORMED, *(pytest.param(each, marks=pytest.mark.long) for each in (ATTENTION, COMPUTED))],
    ids=["batch-norm", "attention", "weight-norm"],
)
def one_rank(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("one_rank")
    run(alone(train_command(data, folder, settings(request.param))))  # 1 rank x 4 microbatches x 8
    return request.param, folder


def distance(ours: Path, theirs: Path) -> float:
    """Return the distance of two runs' gradients and, if there are any, running statistics."""
    between = [gradient_distance(step_gradients(ours), step_gradients(theirs))]
    states = final_state(ours), final_state(theirs)
    if any("running_" in name for name in states[0]):
        between.append(statistics_distance(*states))
    return max(between)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        pytest.param(2, {"batch__microbatch_size": 4}, marks=pytest.mark.long),  # two ranks share a ghost batch
        pytest.param(3, {"optimizer__sharded": "true"}, marks=pytest.mark.long),
    ],
)
def test_foreign_model_any_division_gives_the_same_update(
    ranks: int, changes: dict[str, object], one_rank: tuple[str, Path], data: Path, tmp_path: Path
) -> None:
    name, whole = one_rank
    run(forked(train_command(data, tmp_path, settings(name, **changes)), ranks=ranks))
    assert distance(tmp_path, whole) < ROUNDING


@pytest.mark.long
def test_foreign_model_takes_ghost_batches(data: Path, tmp_path: Path) -> None:
    """What the comparison above would say of torch's own batch norm, and where options had no effect."""
    for span in (4, 8):
        run(alone(train_command(data, tmp_path / f"{span}", settings(NORMED, batch__bn_span=span))))
    assert distance(tmp_path / "4", tmp_path / "8") > 1000 * ROUNDING
    state = final_state(tmp_path / "8")
    assert state["model/head.weight"].shape == (10, 4)


@pytest.mark.long
def test_foreign_model_of_timm_trains_on_two_ranks_and_goes_back_to_timm(data: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "timm.safetensors"
    run(forked(train_command(data, folder, settings(TIMM, run__epochs=1, schedule__warmup_epochs=0)), ranks=2))
    run(alone(["export", str(folder), "--format", "safetensors", "--out", str(out)]))
    timm = importlib.import_module("timm")  # takes seconds, which only this test needs
    theirs = timm.create_model("test_resnet", num_classes=10, checkpoint_path=str(out)).state_dict()
    ours = load_checkpoint(list_checkpoints(folder / "checkpoints")[-1].path)["model"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_foreign_model_resumes_with_the_same_bits(one_rank: tuple[str, Path], data: Path, tmp_path: Path) -> None:
    name, whole = one_rank
    assert cut_back(whole, tmp_path / "resumed", num_checkpoints=3) == 3  # in the middle of the epoch
    done = run(alone(train_command(data, tmp_path / "resumed", settings(name))))
    assert "resumed after step 3" in done.stdout
    assert_identical(final_state(tmp_path / "resumed"), final_state(whole))
