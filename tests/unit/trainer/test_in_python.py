"""bigbatch.train in a process that continues to do other things."""

from pathlib import Path

import torch
from tiny_training import TINY
from torch import nn

from bigbatch.trainer.in_python import train
from bigbatch.trainer.observe.hooks import TrainingHooks


def test_autocast_of_a_model_s_own_sees_the_weights_of_each_step(tmp_path: Path) -> None:
    """torch keeps the casts of weights until the outermost block ends, which a run's modes must not become."""
    layer, seen = nn.Linear(1, 1, bias=False), []

    def use_and_update(step: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen.append(layer(torch.ones(1, 1)).item())
        with torch.no_grad():
            layer.weight.fill_(step)

    run = {"run.epochs": 1, "run.loggers": [], "run.directory": tmp_path, "schedule.warmup_epochs": 0}
    train("quickstart", TINY | run, hooks=TrainingHooks(on_step=use_and_update), quiet=True)
    assert seen[1:] == [1, 2, 3]
