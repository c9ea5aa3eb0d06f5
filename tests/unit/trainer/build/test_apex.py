"""apex: its optimizers by import path (stand-ins with its signatures), and what its amp puts into checkpoints."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor, nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.build.model import build_classifier
from bigbatch.trainer.build.optimizer import make_optimizer
from bigbatch.trainer.checkpoint.weights import load_weights_
from tests.unit.trainer.build.test_optimizer import LR, make, settings_of, walk
from tests.unit.trainer.config.test_schema import make_config

LAMB = {"betas": (0.8, 0.9), "eps": 1e-5}


class FusedLAMB(torch.optim.Optimizer):
    """LAMB in plain torch operations, with apex's arguments, its step count in the group, and its bare zero_grad."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        assert bias_correction
        assert adam_w_mode
        assert grad_averaging
        assert not amsgrad
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults)
        self.use_nvlamb = use_nvlamb

    def zero_grad(self) -> None:  # type: ignore[override]
        """Take no argument, as apex does."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights, after clipping the norm of all gradients together."""
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        clip = (torch.cat([g.flatten() for g in grads]).norm() / self.defaults["max_grad_norm"]).clamp(min=1.0)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                self._update(p, p.grad / clip, self.state[p], group)

    def _update(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        if not state:
            state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(grad**2, 1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** group["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        update = mean / root + group["weight_decay"] * p
        adapts = (group["weight_decay"] or self.use_nvlamb) and p.norm() * update.norm() > 0
        p -= group["lr"] * (p.norm() / update.norm() if adapts else 1.0) * update


@pytest.fixture(autouse=True)
def apex(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    optimizers.FusedLAMB = FusedLAMB  # type: ignore[attr-defined]
    package.optimizers = optimizers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    return optimizers


def test_lamb_of_apex_and_its_successor_make_the_same_steps() -> None:
    theirs, weights = make("apex.optimizers.FusedLAMB", options={**LAMB, "max_grad_norm": 1e9})
    own, own_weights = make("lamb", options=LAMB)
    expected = walk(own, own_weights, steps=range(20))
    torch.testing.assert_close(walk(theirs, weights, steps=range(20)), expected, rtol=1e-5, atol=1e-6)


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
    theirs, ours = (build_classifier(config, nn.BatchNorm2d) for _ in range(2))
    amp = {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 17}}
    torch.save({"model": theirs.state_dict(), "optimizer": {}, "amp": amp}, tmp_path / "amp.pt")
    found = load_weights_(ours, tmp_path / "amp.pt", config=config)
    assert found.note.endswith(told)
    assert bool(found.note) == bool(told)
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
