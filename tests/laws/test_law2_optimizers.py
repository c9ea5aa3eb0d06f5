"""Law 2 for optimizers with state of their own kind, and for shares of it: resuming changes no bit."""

import json
from pathlib import Path

import pytest
import torch

from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from tests.laws.jobs import (
    ROUNDING,
    SGD,
    alone,
    assert_identical,
    final_state,
    forked,
    gradient_distance,
    message,
    run,
    step_gradients,
    train_command,
)

CONSTANT = {
    "schedule.name": "step",
    "schedule.base_lr": 0.01,
    "schedule.options.milestone_epochs": "[]",
    "schedule.options.gamma": 0.1,
    "schedule.end_lr": "null",
}
CYCLIC = {
    "schedule.name": "cyclic",
    "schedule.warmup_epochs": 0,
    "schedule.options.cycle_epochs": 0.7,
    "schedule.low_momentum": 0.5,
}
"""The end of an epoch is amid a cycle of the rate and of the momentum."""
SHAMPOO = {
    **CONSTANT,
    "optimizer.name": "shampoo",
    "optimizer.options.nesterov": "true",
    "optimizer.clip_norm": 1.0,
    "optimizer.options.eps": 1e-4,
    "optimizer.options.root_every_steps": 3,
    "optimizer.options.block_size": 48,
}
SCHEDULE_FREE = {
    **CONSTANT,
    "optimizer.name": "schedulefree.SGDScheduleFree",
    "optimizer.options": '{"momentum":0.9,"warmup_steps":3}',
}
EVALUATED_LAST = {"run.epochs": 2, "run.eval_every_epochs": 2}


def train(data: Path, folder: Path, settings: dict[str, object], *, ranks: int, **changes: object) -> None:
    command = train_command(data, folder, {**settings, **{k.replace("__", "."): v for k, v in changes.items()}})
    run(forked(command, ranks=ranks))


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(1, {**SCHEDULE_FREE, "optimizer.precision": "bf16"}, marks=pytest.mark.long),
        (2, {**CYCLIC, "optimizer.sharded": "true"}),
        pytest.param(
            2, {**SHAMPOO, "optimizer.sharded": "true", "optimizer.precision": "bf16"}, marks=pytest.mark.long
        ),
    ],
    ids=["schedulefree-bf16", "cyclic-sharded-lars", "sharded-shampoo-bf16"],
)
def test_a_run_in_two_parts_is_the_run_in_one(
    ranks: int, settings: dict[str, object], data: Path, tmp_path: Path
) -> None:
    """The first part ends with a checkpoint and an evaluation that the whole run does not make there."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(data, whole, {**EVALUATED_LAST, **settings}, ranks=ranks)
    train(data, parts, {**EVALUATED_LAST, **settings}, ranks=ranks, run__epochs=1)
    train(data, parts, {**EVALUATED_LAST, **settings}, ranks=ranks)
    assert_identical(final_state(parts), final_state(whole))


def test_what_is_kept_of_schedule_free_is_its_average(data: Path, tmp_path: Path) -> None:
    """In a checkpoint `model` is the average, x = y + (1 - 1/beta) * (z - y); in_training is y."""
    train(data, tmp_path, {**EVALUATED_LAST, **SCHEDULE_FREE}, ranks=1)
    state = load_checkpoint(list_checkpoints(tmp_path / "checkpoints")[-1].path)
    names = [name for group in state["optimizer"]["param_groups"] for name in group["names"]]
    for index, (name, y) in enumerate(zip(names, state["in_training"], strict=True)):
        z = state["optimizer"]["state"][index]["z"]
        expected = y.double() + (1 - 1 / 0.9) * (z.double() - y.double())
        torch.testing.assert_close(state["model"][name].double(), expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(state["model"][name], y)


@pytest.mark.long
def test_shares_go_on_at_another_world_size_and_in_whole(data: Path, tmp_path: Path) -> None:
    settings = {**SGD, **CONSTANT, "schedule.base_lr": 1e-5, "run.epochs": 3}
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(data, whole, settings, ranks=1)
    sharded = {**settings, "optimizer.sharded": "true"}
    train(data, moved, sharded, ranks=2, run__epochs=1)
    train(data, moved, settings, ranks=1, run__epochs=2)
    train(data, moved, sharded, ranks=4)
    assert json.loads((moved / "summary.json").read_text())["algorithm"] == "reduce-scatter"
    assert gradient_distance(step_gradients(moved), step_gradients(whole)) < ROUNDING


def test_an_optimizer_that_is_not_installed_is_one_line(data: Path, tmp_path: Path) -> None:
    command = train_command(data, tmp_path, {**SCHEDULE_FREE, "optimizer.name": "no_such_package.Shampoo"})
    told = message(run(alone(command), expect=1))
    assert "optimizer.name=no_such_package.Shampoo: No module named 'no_such_package': " in told
    assert "install the package that has it" in told
