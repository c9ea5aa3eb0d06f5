"""From a config to its optimizer: against torch's plain ones, through overflows, and out of other packages."""

import io
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from error_texts import naming
from optimizer_steps import DEVICES, assert_same_bits, clones, scaled_step, set_random_grads
from torch import nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.build.optimizer import make_optimizer, stated_settings
from bigbatch.trainer.config.sections import OPTIMIZERS
from bigbatch.trainer.optim.fused import FusedOptimizer
from bigbatch.trainer.optim.lamb import LAMB
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.lion import Lion
from bigbatch.trainer.optim.muon import Muon
from bigbatch.trainer.optim.param_groups import load_optimizer_state
from bigbatch.trainer.optim.shampoo import Shampoo
from bigbatch.trainer.optim.two_weights import TwoWeights, has_modes
from tests.unit.trainer.config.test_schema import make_config

SGDScheduleFree = pytest.importorskip("schedulefree").SGDScheduleFree

LR = 0.1
OF_LARS = {"nesterov": True, "trust_coefficient": 0.01, "momentum_form": "lr_outside", "eps": 0.1}
OF_MUON = {"vector_lr_factor": 0.5, "newton_schulz_steps": 3, "newton_schulz_precision": "fp32"}
OF_SHAMPOO = {"eps": 1e-4, "block_size": 3, "root_every_steps": 2, "factor_decay": 0.9}
MUON = {"nesterov": True, **OF_MUON}
SHAMPOO = {"nesterov": True, **OF_SHAMPOO}
OF_ALL = {**OF_MUON, **OF_SHAMPOO}
"""Settings of the whole optimizer, not of a group."""
SETTINGS: dict[str, dict[str, Any]] = {
    "lars": {"momentum": 0.9, "options": OF_LARS},
    "lamb": {"options": {"betas": (0.8, 0.9), "eps": 1e-5}},
    "sgd": {"momentum": 0.9},
    "adamw": {"options": {"betas": (0.8, 0.9), "eps": 1e-5}},
    "lion": {"options": {"betas": (0.8, 0.9)}},
    "muon": {"momentum": 0.9, "options": MUON},
    "shampoo": {"momentum": 0.9, "options": SHAMPOO},
    "schedulefree.SGDScheduleFree": {"options": {"momentum": 0.8, "warmup_steps": 3}},
    "torch.optim.Adagrad": {"options": {"lr_decay": 0.01}},
}


def settings_of(name: str, **changes: Any) -> Any:
    values = {"momentum": None, **SETTINGS.get(name, {}), "weight_decay": 0.01, **changes}
    return make_config({f"optimizer.{k}": v for k, v in {"name": name, **values}.items()}).optimizer


def model_on(device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5))
    return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def make(name: str, *, device: str = "cpu", **changes: Any) -> tuple[torch.optim.Optimizer, list[Any]]:
    model = model_on(device)
    optimizer = make_optimizer(settings_of(name, **changes), model, dict(model.named_parameters()), lr=LR)
    return optimizer, list(model.parameters())


def walk(optimizer: torch.optim.Optimizer, weights: list[Any], *, steps: range) -> list[Any]:
    for seed in steps:
        set_random_grads(weights, seed=seed)
        optimizer.step()
    return clones(weights)


def states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [{k: v.clone() for k, v in state.items()} for state in optimizer.state_dict()["state"].values()]


def test_make_optimizer_makes_every_name_of_the_config() -> None:
    types = {name: type(make(name)[0]) for name in OPTIMIZERS}
    others = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    assert types == {"lars": LARS, "lamb": LAMB, "lion": Lion, "muon": Muon, "shampoo": Shampoo, **others}
    assert {*OPTIMIZERS} == {name for name in SETTINGS if "." not in name}, "each has its row in SETTINGS"


def test_every_optimizer_stands_in_the_pages_table() -> None:
    page = (Path(__file__).parents[4] / "docs/optimizers.md").read_text().split("\n\n- ")[0]
    assert sorted(re.findall(r"^\| \[?`(\w+)`", page, re.M)) == sorted(OPTIMIZERS)


def test_make_optimizer_hands_options_on() -> None:
    optimizer: Any = make("shampoo")[0]
    assert (optimizer._block_size, optimizer._every, optimizer._factor_decay, optimizer._eps) == (3, 2, 0.9, 1e-4)
    optimizer = make("muon", options={**MUON, "nesterov": False, "newton_schulz_precision": "bf16"})[0]
    assert (optimizer._steps, optimizer._precision) == (3, "bf16")
    assert [group["nesterov"] for group in optimizer.param_groups] == [False, False]


@pytest.mark.parametrize("name", SETTINGS)
def test_make_optimizer_hands_settings_on(name: str) -> None:
    optimizer, _ = make(name)
    decaying, other = optimizer.param_groups
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.01, 0.0)
    assert decaying["names"] == ["0.weight", "2.weight"]
    stated = {**SETTINGS[name], **SETTINGS[name].get("options", {})}
    stated.pop("options", None)
    for group in (decaying, other):
        assert group["lr"] == LR
        of_groups = {key: value for key, value in stated.items() if key not in OF_ALL or key in group}
        assert {key: group[key] for key in of_groups} == of_groups


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changes", [{}, {"options": {"nesterov": True}}, {"momentum": 0.0}])
def test_sgd_is_torchs_plain_one(changes: dict[str, Any], device: str) -> None:
    optimizer, weights = make("sgd", device=device, **changes)
    plain_model = model_on(device)
    groups = [
        {"params": [p for n, p in plain_model.named_parameters() if (n in ("0.weight", "2.weight")) is decays]}
        for decays in (True, False)
    ]
    groups[0]["weight_decay"] = 0.01  # type: ignore[assignment]
    momentum = changes.get("momentum", 0.9)
    plain = torch.optim.SGD(groups, lr=LR, foreach=False, momentum=momentum, nesterov="options" in changes)
    expected = walk(plain, list(plain_model.parameters()), steps=range(20))
    torch.testing.assert_close(walk(optimizer, weights, steps=range(20)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_adamw_is_torchs_plain_one(device: str) -> None:
    optimizer, weights = make("adamw", device=device, exclude_bias_and_norm=False)
    plain_model = model_on(device)
    plain = torch.optim.AdamW(
        plain_model.parameters(), lr=LR, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.01, foreach=False
    )
    expected = walk(plain, list(plain_model.parameters()), steps=range(20))
    torch.testing.assert_close(walk(optimizer, weights, steps=range(20)), expected, rtol=1e-5, atol=1e-5)


def test_muon_has_a_rate_of_its_own_for_what_is_no_matrix() -> None:
    optimizer, _ = make("muon", bias_lr_factor=4.0, exclude_bias_and_norm=False)
    names = [(group["names"], group["adapt"], group["lr_factor"]) for group in optimizer.param_groups]
    assert names == [
        (["0.weight", "2.weight"], True, 1.0),
        (["1.weight"], False, 0.5),  # batch norm's: not a bias, but a vector
        (["0.bias", "1.bias", "2.bias"], False, 2.0),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("first", "unscale_first"), [(0, False), (2, True)])
@pytest.mark.parametrize("name", SETTINGS)
def test_optimizer_keeps_no_trace_of_an_overflow(name: str, first: int, unscale_first: bool, device: str) -> None:
    """first=0: an overflow in the very first step, when an optimizer has no state yet."""
    ends = []
    for poisons in ([], [math.inf, math.nan]):
        optimizer, weights = make(name, device=device)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1000)
        for seed in range(4):
            for poison in poisons if seed == first else []:
                before = clones(weights)
                step_scaled(scaler, optimizer, weights, seed=99, poison=poison, unscale_first=unscale_first)
                assert_same_bits(clones(weights), before)
            step_scaled(scaler, optimizer, weights, seed=seed, unscale_first=unscale_first)
        ends.append((clones(weights), states(optimizer), scaler.get_scale()))
    assert_same_bits(ends[1][:2], ends[0][:2])
    assert (ends[0][2], ends[1][2]) == (2.0**10, 2.0**8)


def step_scaled(scaler: Any, optimizer: Any, weights: list[Any], *, seed: int, poison: Any = None, **how: Any) -> None:
    """Make a scaled step, also with optimizers that write into gradients."""
    own = isinstance(optimizer, FusedOptimizer)
    if own:
        scaled_step(scaler, optimizer, weights, seed=seed, poison=poison, **how)
        return
    scale = scaler.scale(torch.ones((), device=weights[0].device))
    set_random_grads(weights, seed=seed, scale=float(scale))
    if poison is not None:
        weights[1].grad.view(-1)[2] = poison
    if how["unscale_first"]:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def modes(optimizer: torch.optim.Optimizer) -> Any:
    """The weights for evaluation within the block, of an optimizer that has two sets."""
    return TwoWeights(optimizer).for_evaluation(on_change=lambda: None) if has_modes(optimizer) else nullcontext([])


@pytest.mark.parametrize("name", SETTINGS)
def test_optimizer_state_dict_resumes_bit_for_bit(name: str) -> None:
    whole, weights = make(name)
    expected = walk(whole, weights, steps=range(8))
    first, weights = make(name)
    walk(first, weights, steps=range(4))
    with modes(first) as in_training:
        saved = {"weights": clones(weights), "in_training": in_training, "optimizer": first.state_dict()}
        torch.save(saved, file := io.BytesIO())
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, weights = make(name)
    with torch.no_grad():
        torch._foreach_copy_(weights, saved["weights"])
    load_optimizer_state(second, saved["optimizer"], stated=stated_settings(settings_of(name)))
    if has_modes(second):
        TwoWeights(second).restore(saved["in_training"])
    assert_same_bits(walk(second, weights, steps=range(4, 8)), expected)
    assert_same_bits(states(second), states(whole))


def test_load_optimizer_state_leaves_what_is_stated_and_brings_what_is_counted() -> None:
    name = "schedulefree.SGDScheduleFree"
    first, weights = make(name)
    walk(first, weights, steps=range(4))
    options = {"momentum": 0.7, "warmup_steps": 3}
    second, _ = make(name, options=options)
    load_optimizer_state(second, first.state_dict(), stated=stated_settings(settings_of(name, options=options)))
    assert [(g["momentum"], g["k"]) for g in second.param_groups] == [(0.7, 4)] * 2
    assert "lr_factor" in stated_settings(settings_of(name))
    assert stated_settings(settings_of("lars")) is None


def test_eval_mode_takes_the_average_and_training_goes_on_where_it_was() -> None:
    """Schedule-Free's own train() after eval() rounds; beside it stands the package's own optimizer, used plainly."""
    optimizer, weights = make("schedulefree.SGDScheduleFree", exclude_bias_and_norm=False)
    plain_model = model_on("cpu")
    plain = SGDScheduleFree(plain_model.parameters(), lr=LR, weight_decay=0.01, momentum=0.8, warmup_steps=3)
    plain.train()
    in_training = walk(optimizer, weights, steps=range(5))
    walk(plain, list(plain_model.parameters()), steps=range(5))
    plain.eval()
    calls: list[list[Any]] = []
    with TwoWeights(optimizer).for_evaluation(on_change=lambda: calls.append(clones(weights))) as kept:
        assert_same_bits(clones(weights), clones(plain_model.parameters()))
        assert_same_bits(kept, in_training)
        assert not torch.equal(weights[0], in_training[0])
    assert_same_bits(clones(weights), in_training)
    assert_same_bits(calls, [clones(plain_model.parameters()), in_training])
    walk(optimizer, weights, steps=range(5, 6))


SCHEDULE_FREE = "schedulefree.SGDScheduleFree"
AVERAGE = {"ema_decay": 0.9, "ema_every_steps": 1}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("no_such_package.Shampoo", {}, ("optimizer.name=no_such_package.Shampoo: ", "'no_such_package'")),
        ("schedulefree.Shampoo", {}, ("optimizer.name=schedulefree.Shampoo: ", " Shampoo;", " SGDScheduleFree")),
        ("math.Shampoo", {}, ("optimizer.name=math.Shampoo: ", " math ", " Shampoo;", " none")),
        ("torch.nn.Linear", {}, ("optimizer.name=torch.nn.Linear: ", "torch.optim.Optimizer")),
        ("math.pi", {}, ("optimizer.name=math.pi: ", "torch.optim.Optimizer")),
        (SCHEDULE_FREE, {"options": {"momentun": 0.8}}, ("optimizer.options={'momentun': 0.8} ", SCHEDULE_FREE)),
        (SCHEDULE_FREE, {"options": {"momentum": 1.5}}, ("optimizer.options={'momentum': 1.5} ", ": 1.5")),
        ("torch.optim.Rprop", {}, ("optimizer.weight_decay=0.01 ", "torch.optim.Rprop", " 0")),
        (SCHEDULE_FREE, AVERAGE, ("optimizer.ema_decay=0.9 ", SCHEDULE_FREE, "optimizer.ema_every_steps", "null")),
        ("sgd", {"lr_factors": {"fc.*": 2.0}}, ("optimizer.lr_factors: pattern 'fc.*' ",)),  # which decides for nothing
    ],
)
def test_make_optimizer_refuses_in_one_line_that_names_the_key(
    name: str, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=naming(*named)) as caught:
        make(name, **changes)
    assert str(caught.value).startswith(named[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes"), [("torch.optim.Rprop", {"weight_decay": 0.0}), ("torch.optim.Adagrad", AVERAGE)]
)
def test_make_optimizer_takes_what_the_optimizer_can_have(name: str, changes: dict[str, Any]) -> None:
    make(name, **changes)


def test_make_optimizer_tells_of_a_package_that_lacks_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    half_there = ModuleType("half_there")
    half_there.__path__ = []
    monkeypatch.setitem(sys.modules, "half_there", half_there)
    with pytest.raises(ConfigError, match=naming("'half_there.optim'", "install the package that has it")):
        make("half_there.optim.Muon")
    whole = ModuleType("whole")
    whole.Muon = torch.optim.SGD  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "whole", whole)
    assert isinstance(make("whole.Muon")[0], torch.optim.SGD)


def test_load_optimizer_state_without_momentum_begins_it_from_zero() -> None:
    without, weights = make("sgd", momentum=0.0)
    walk(without, weights, steps=range(1))
    optimizer, weights = make("sgd")
    load_optimizer_state(optimizer, without.state_dict())
    momenta = [optimizer.state[weight].get("momentum_buffer") for weight in weights]
    assert all(momentum is not None and not bool(momentum.any()) for momentum in momenta)
