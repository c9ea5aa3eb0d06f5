"""A run goes on exactly from its checkpoint with optimizers of timm and torch_optimizer, whatever state they keep."""

from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_steps import assert_same_bits, clones, set_random_grads
from whole_states import state_of

from bigbatch.errors import DamagedCheckpoint
from bigbatch.trainer.build.optimizer import make_optimizer, stated_settings
from bigbatch.trainer.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from bigbatch.trainer.checkpoint.fields import require_fields
from bigbatch.trainer.checkpoint.saving import copy_to_host
from bigbatch.trainer.optim.param_groups import load_optimizer_state
from tests.unit.trainer.build.test_optimizer import model_on
from tests.unit.trainer.config.test_schema import make_config

pytest.importorskip("timm")
pytest.importorskip("torch_optimizer")

KEPT = {
    # name: what it keeps besides tensors of a weight's shape
    "timm.optim.Adan": "a count in each group",
    "timm.optim.Lamb": "a count in each group",
    "timm.optim.Mars": "",
    "timm.optim.Muon": "a bool",
    "timm.optim.NAdamLegacy": "a number",
    "timm.optim.NvNovoGrad": "a scalar exp_avg_sq",
    "timm.optim.Adafactor": "rows and columns",
    "timm.optim.kron.Kron": "a list of tensors, and a random state",
    "torch_optimizer.AggMo": "a dict of tensors as momentum_buffer",
    "torch_optimizer.NovoGrad": "a scalar exp_avg_sq",
    "torch_optimizer.Ranger": "",
    "torch_optimizer.Shampoo": "",
}


def config_of(name: str) -> Any:
    return make_config({"optimizer.name": name, "optimizer.momentum": None, "optimizer.weight_decay": 0.01})


def made(name: str) -> tuple[torch.optim.Optimizer, list[Any]]:
    model = model_on("cpu")
    return make_optimizer(config_of(name).optimizer, model, {}, lr=0.01), list(model.parameters())


def walk(optimizer: torch.optim.Optimizer, weights: list[Any], *, steps: range) -> None:
    torch.manual_seed(steps.start)  # Kron draws from torch's generator, as a run seeds it
    for seed in steps:
        set_random_grads(weights, seed=seed)
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KEPT)
def test_foreign_optimizer_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    with torch.compiler.set_stance("force_eager"):
        whole, weights = made(name)
        walk(whole, weights, steps=range(3))
        names = "\n".join(name for group in whole.param_groups for name in group["names"])
        state = state_of(config, step=3, optimizer=whole.state_dict(), gradient_order=names)
        saved = copy_to_host({**state, "model": dict(enumerate(weights))})
        path = save_checkpoint(tmp_path, saved, step=3, top1=None, keep=1)

        loaded = load_checkpoint(path)
        resumed, resumed_weights = made(name)
        with torch.no_grad():
            torch._foreach_copy_(resumed_weights, list(loaded.pop("model").values()))
        require_fields({**loaded, "model": {}}, source="c")
        load_optimizer_state(resumed, loaded["optimizer"], stated=stated_settings(config.optimizer))
        walk(resumed, resumed_weights, steps=range(3, 6))
        walk(whole, weights, steps=range(3, 6))
    assert_same_bits(clones(resumed_weights), clones(weights))
    assert resumed.state_dict().get("rng_state") == whole.state_dict().get("rng_state"), "Kron's own generator"


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize("value", [CYCLE, {"a": [CYCLE]}, [torch.tensor(torch.inf)], {"a": "b"}, {"a": {1.0: {"b"}}}])
def test_foreign_optimizer_state_of_another_kind_is_damage(value: object) -> None:
    state = {"state": {0: {"a": value}}, "param_groups": [{"params": [0], "names": ["w"]}]}
    whole = state_of(config_of("timm.optim.Muon"), step=1, optimizer=state, gradient_order="w")
    with pytest.raises(DamagedCheckpoint, match="c is damaged: optimizer is a dict"):
        require_fields(whole, source="c")


@pytest.mark.parametrize("value", ["3", [3], None, {}])
@pytest.mark.parametrize("key", ["step", "eps"])
def test_foreign_optimizer_setting_of_another_kind_is_refused(key: str, value: object) -> None:
    saved, (optimizer, _) = made("timm.optim.Lamb")[0].state_dict(), made("timm.optim.Lamb")
    saved["param_groups"][0][key] = value
    with pytest.raises(ValueError, match=f"{key} in a group of the optimizer is not of its type"):
        load_optimizer_state(optimizer, saved, stated=("params", "names"))
