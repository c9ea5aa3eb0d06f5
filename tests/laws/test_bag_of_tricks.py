"""Laws 1 and 2 with all of the bag of tricks: whitening, frozen scales, raised biases."""

from pathlib import Path

import pytest
import torch

from bigbatch.cli import main
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from tests.laws.jobs import (
    ROUNDING,
    SGD,
    alone,
    assert_identical,
    cut_back,
    final_state,
    forked,
    gradient_distance,
    records,
    run,
    statistics_distance,
    step_gradients,
    train_command,
)

BAG = {
    "data.loader": "torchvision",
    "model.options.celu_alpha": 0.3,
    "model.options.norm_scale": 1.0,
    "model.options.logit_scale": 0.0625,
    "model.options.whitening_eps": 0.01,
    "optimizer.bias_lr_factor": 64,
    "optimizer.exclude_bias_and_norm": "false",
}
FILTERS = "model/prep.0.weight"


def test_any_number_of_ranks_gives_the_same_update(data: Path, tmp_path: Path) -> None:
    run(alone(train_command(data, tmp_path / "1", {**BAG, **SGD})))
    run(forked(train_command(data, tmp_path / "2", {**BAG, **SGD}), ranks=2))
    one, two = final_state(tmp_path / "1"), final_state(tmp_path / "2")
    assert torch.equal(one[FILTERS], two[FILTERS])
    assert not torch.equal(one[FILTERS], torch.eye(27).view(27, 3, 3, 3))
    assert gradient_distance(step_gradients(tmp_path / "2"), step_gradients(tmp_path / "1")) < ROUNDING
    assert statistics_distance(two, one) < ROUNDING


@pytest.mark.long
def test_resumed_run_ends_with_the_same_bits(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    overrides = {**BAG, "optimizer.sharded": "true", "optimizer.precision": "bf16", "optimizer.bias_lr_factor": 4}
    overrides |= {"run.checkpoint_every_steps": 1, "run.keep_checkpoints": 100}
    run(forked(train_command(data, whole, overrides), ranks=2))
    step = cut_back(whole, resumed, num_checkpoints=3)
    done = run(forked(train_command(data, resumed, overrides), ranks=2))
    assert f"resumed after step {step}" in done.stdout
    assert_identical(final_state(resumed), final_state(whole))
    last = list_checkpoints(whole / "checkpoints")[-1]
    assert main(["evaluate", str(whole), "--checkpoint", str(last.path), "--json"]) == 0
    assert f'"top1": {records(whole, "eval")[-1]["top1"]}' in capsys.readouterr().out
