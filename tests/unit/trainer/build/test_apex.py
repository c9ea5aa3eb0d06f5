"""apex: its optimizers by import path (stand-ins with its signatures), and what its amp puts into checkpoints."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.build.model import _build_model
from bigbatch.trainer.build.optimizer import make_optimizer, stated_settings
from bigbatch.trainer.optim.param_groups import load_optimizer_state
from bigbatch.trainer.run.weights import load_weights_
from tests.unit.trainer.build.test_optimizer import LR, make, settings_of, walk
from tests.unit.trainer.config.test_schema import make_config


class FusedLAMB(torch.optim.SGD):
    """Has apex's bare zero_grad, and its step count in the group."""

    def zero_grad(self) -> None:  # type: ignore[override]
        """Take no argument, as apex does."""
        super().zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count in the groups."""
        super().step()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


@pytest.fixture(autouse=True)
def apex(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    optimizers.FusedLAMB = FusedLAMB  # type: ignore[attr-defined]
    package.optimizers = optimizers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    return optimizers


def test_optimizer_of_apex_continues_its_count_in_the_groups() -> None:
    name = "apex.optimizers.FusedLAMB"
    first, weights = make(name)
    walk(first, weights, steps=range(3))
    second, _ = make(name)
    load_optimizer_state(second, first.state_dict(), stated=stated_settings(settings_of(name)))
    assert [group["step"] for group in second.param_groups] == [3, 3]


@pytest.mark.parametrize("error", [RuntimeError, ImportError])
def test_apex_without_its_kernels_is_one_line(apex: Any, error: type[Exception]) -> None:
    def make_none(*_: Any, **__: Any) -> None:
        raise error("FusedLAMB requires cuda extensions")

    apex.FusedLAMB = type("FusedLAMB", (torch.optim.Optimizer,), {"__init__": make_none})
    with pytest.raises(ConfigError, match=naming("apex.optimizers.FusedLAMB", "requires cuda extensions")):
        make_optimizer(
            settings_of("apex.optimizers.FusedLAMB"), model := nn.Linear(2, 2), dict(model.named_parameters()), lr=LR
        )


@pytest.mark.parametrize(("precision", "told"), [("fp16", "--optimizer.loss_scale 4096"), ("bf16", "")])
def test_weights_beside_the_state_of_amp_are_read_and_its_scale_is_told(
    precision: str, told: str, tmp_path: Path
) -> None:
    scale = {"fp16": (65536.0, 2000), "bf16": (None, None)}[precision]
    keys = ("optimizer.precision", "optimizer.loss_scale", "optimizer.loss_scale_growth_steps")
    config = make_config({"model.name": "resnet18", **dict(zip(keys, (precision, *scale), strict=True))})
    theirs, ours = (_build_model(config, nn.BatchNorm2d) for _ in range(2))
    amp = {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 17}}
    torch.save({"model": theirs.state_dict(), "optimizer": {}, "amp": amp}, tmp_path / "amp.pt")
    found = load_weights_(ours, tmp_path / "amp.pt", config=config)
    assert found.note.endswith(told)
    assert bool(found.note) == bool(told)
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
