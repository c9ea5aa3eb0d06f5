"""bigbatch.train in a process that continues to do other things."""

from pathlib import Path

import pytest
import torch
from tiny_training import TINY
from torch import nn

from bigbatch.trainer.in_python import _process_as_before, train
from bigbatch.trainer.machine.host import set_tf32
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


def test_process_computes_as_before_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def modes() -> list[object]:
        cudnn = torch.backends.cudnn
        return [torch.get_num_threads(), torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark]

    before = modes()
    with _process_as_before():
        torch.set_num_threads(torch.get_num_threads() + 1)
        set_tf32(not torch.backends.cudnn.allow_tf32)
        set_tf32(torch.get_float32_matmul_precision() == "highest")
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    after = modes()
    torch.set_num_threads(before[0])
    assert after == before

    def refuse() -> str:
        raise RuntimeError("a mix of legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    with _process_as_before():
        pass
