"""Fine-tuning keeps the laws: frozen parts stay as they were, a new head is trained, and a resumed run is exact."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigbatch.cli import main
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from bigbatch.trainer.models import build_model
from tests.laws.jobs import (
    ROUNDING,
    SGD,
    alone,
    assert_identical,
    cut_back,
    final_state,
    forked,
    gradient_distance,
    message,
    run,
    statistics_distance,
    step_gradients,
    train_command,
)

FROZEN = ("prep.", "layer1.")
TUNED = {
    "data.loader": "torchvision",
    "model.new_head": "true",
    "model.frozen": "[prep.*, layer1.*]",
    "optimizer.lr_factors": '{"linear.*": 1, "*": 0.25}',
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Weights of 7 classes, with statistics that are not those of the start."""
    torch.manual_seed(3)
    weights = build_model("resnet9", num_classes=7, norm=nn.BatchNorm2d, width=4).state_dict()
    for name, tensor in weights.items():
        if name.endswith("running_mean"):
            tensor.uniform_(-0.1, 0.1)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
    path = tmp_path_factory.mktemp("weights") / "seven.pth"
    torch.save(weights, path)
    return path, weights


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.ema_decay": 0.9, "optimizer.ema_every_steps": 2},
        pytest.param({"optimizer.precision": "bf16", "optimizer.sharded": "true"}, marks=pytest.mark.long),
    ],
    ids=["lars-average", "bf16-sharded"],
)
def test_frozen_parts_stay_and_a_resumed_run_is_exact(
    settings: dict[str, object], data: Path, pretrained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    path, weights = pretrained
    overrides = {**TUNED, **settings, "model.weights": path, "run.checkpoint_every_steps": 3}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = run(forked(train_command(data, whole, overrides), ranks=2))
    assert "frozen" in done.stdout
    state = load_checkpoint(list_checkpoints(whole / "checkpoints")[-1].path)
    for name, tensor in state["model"].items():
        is_same = tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name])
        assert is_same is (name.startswith(FROZEN) or name.endswith("num_batches_tracked")), name
    groups = state["optimizer"]["param_groups"]
    factors = {name: group["lr_factor"] for group in groups for name in group["names"]}
    assert [name for name, factor in factors.items() if factor == 1] == ["linear.weight"]
    assert not any(name.startswith(FROZEN) for name in (*factors, *state["gradient_order"].split("\n")))
    assert len(state["optimizer"]["state"]) == len(factors)
    cut_back(whole, broken, num_checkpoints=2)
    assert "resumed after step" in run(forked(train_command(data, broken, overrides), ranks=2)).stdout
    assert_identical(final_state(broken), final_state(whole))


@pytest.mark.long
def test_frozen_any_division_gives_the_same_update(
    data: Path, pretrained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    overrides = {**SGD, **TUNED, "model.weights": pretrained[0], "run.epochs": 1, "schedule.warmup_epochs": 0}
    one, two = tmp_path / "one", tmp_path / "two"
    run(alone(train_command(data, one, overrides)))
    run(forked(train_command(data, two, overrides), ranks=2))
    assert gradient_distance(step_gradients(two), step_gradients(one)) < ROUNDING
    assert statistics_distance(final_state(two), final_state(one)) < ROUNDING


@pytest.mark.long
def test_fine_tuned_run_is_evaluated_and_started_from(
    data: Path, pretrained: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tuned"
    settings = {**TUNED, "model.weights": pretrained[0], "run.epochs": 1, "schedule.warmup_epochs": 0}
    run(alone(train_command(data, folder, settings)))
    trained = json.loads((folder / "summary.json").read_text())
    assert main(["evaluate", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["top1"] == pytest.approx(trained["top1"])
    # frozen at first, all of it then: what fine-tuning does in two runs
    start = list_checkpoints(folder / "checkpoints")[-1].path
    thawed = {"data.loader": "torchvision", "model.weights": start, "run.epochs": 1, "schedule.warmup_epochs": 0}
    done = run(alone(train_command(data, tmp_path / "all", thawed)))
    assert f"starts from the weights in {start}" in done.stdout
    refused = run(alone(train_command(data, folder, {**settings, "model.frozen": "null", "run.epochs": 2})), expect=1)
    assert "model.frozen=[prep.*, layer1.*]" in message(refused)
