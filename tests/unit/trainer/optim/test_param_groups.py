"""Which parameters decay, and that the groups drive LARS and torch's own SGD."""

import pytest
import torch
import torchvision
from error_texts import naming
from torch import nn

from bigbatch.trainer.optim.lamb import LAMB
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.param_groups import decays, load_optimizer_state, param_groups

torch.set_num_threads(1)


class RenamedBatchNorm(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, affine=True),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.RMSNorm(4),
        RenamedBatchNorm(4),
    ],
)
def test_param_groups_decay_nothing_of_a_normalisation_layer(norm):
    has_decay = decays(nn.Sequential(nn.Linear(4, 4), norm))
    assert {name: decay for name, decay in has_decay.items() if name.startswith("1.")} == {
        f"1.{name}": False for name, _ in norm.named_parameters()
    }
    assert has_decay["0.weight"] is True
    assert has_decay["0.bias"] is False


class WithTokens(nn.Module):
    """Has a token and a layer scale besides weights, as timm's ViT and ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.gamma = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 4)

    def no_weight_decay(self) -> set[str]:
        return {"token"}


def test_param_groups_leave_out_vectors_and_what_the_model_lists():
    assert decays(WithTokens()) == {"token": False, "gamma": False, "linear.weight": True, "linear.bias": False}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_param_groups_leave_out_what_a_wrapped_model_lists(prefix):
    model = WithTokens()
    for name in reversed(prefix.split(".")[:-1]):
        model = torch.compile(model) if name == "_orig_mod" else nn.ModuleDict({name: model})
    assert [name for name, has_decay in decays(model).items() if has_decay] == [f"{prefix}linear.weight"]


@pytest.mark.parametrize("factor", [0, -1.0, float("nan")])
def test_param_groups_refuse_a_factor_that_is_not_positive(factor):
    with pytest.raises(ValueError, match=f"bias_lr_factor must be positive, not {factor}"):
        param_groups(nn.Linear(2, 2), weight_decay=0.1, bias_lr_factor=factor)


def test_param_groups_leave_out_the_magnitudes_of_weight_norm():
    """They scale a layer's outputs as a norm's weight does, and have the shape (out, 1, 1, 1)."""
    new = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    old = nn.Linear(4, 2, bias=False)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(old)
    head = nn.Linear(4, 1)  # one class: its weight has one row, and decays
    found = decays(nn.Sequential(new, old, head))
    assert [name for name, has_decay in found.items() if has_decay] == [
        "0.parametrizations.weight.original1",
        "1.weight_v",
        "2.weight",
    ]


def test_param_groups_know_biases_under_torchs_other_names():
    has_decay = decays(nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "lstm": nn.LSTM(3, 4)}))
    assert has_decay == {
        "attention.in_proj_weight": True,
        "attention.in_proj_bias": False,
        "attention.out_proj.weight": True,
        "attention.out_proj.bias": False,
        "lstm.weight_ih_l0": True,
        "lstm.weight_hh_l0": True,
        "lstm.bias_ih_l0": False,
        "lstm.bias_hh_l0": False,
    }


def test_param_groups_of_resnet50():
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    decaying, other = param_groups(model, weight_decay=5e-5)
    # 53 convolutions and the classifier's matrix; 53 batch norms with two vectors each and one bias
    assert [p.dim() for p in decaying["params"]] == [4] * 53 + [2]
    assert len(other["params"]) == 2 * 53 + 1
    assert (decaying["weight_decay"], decaying["adapt"]) == (5e-5, True)
    assert (other["weight_decay"], other["adapt"]) == (0.0, False)
    named = dict(model.named_parameters())
    for group in (decaying, other):
        assert all(named[n] is p for n, p in zip(group["names"], group["params"], strict=True))


def test_param_groups_have_a_shared_parameter_once():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert decays(model) == {"0.weight": True, "0.bias": False, "1.bias": False}
    assert [p is first.weight for p in param_groups(model, weight_decay=0.1)[0]["params"]] == [True]


def test_param_groups_leave_out_frozen_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert [group["names"] for group in param_groups(model, weight_decay=0.1)] == [["1.weight"], ["1.bias"]]


def test_param_groups_substitute_by_name():
    model = nn.Linear(2, 2).half()
    master = model.weight.detach().float().requires_grad_()
    decaying, other = param_groups(model, weight_decay=0.1, substitute={"weight": master})
    assert decaying["params"][0] is master
    assert other["params"][0] is model.bias


def test_param_groups_refuse_a_substitute_for_no_trainable_parameter():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    substitute = {"bias": torch.zeros(2), "wieght": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r": bias, wieght$"):
        param_groups(model, weight_decay=0.1, substitute=substitute)


def stepped(optimizer_class, model=None, **settings):
    model = model or nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = optimizer_class(param_groups(model, weight_decay=0.1), lr=0.1, **settings)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("optimizer_class", [LARS, torch.optim.SGD])
def test_load_optimizer_state_brings_momentum_and_leaves_settings(optimizer_class):
    saved = stepped(optimizer_class, momentum=0.9).state_dict()
    model = nn.Linear(2, 2)
    optimizer = optimizer_class(param_groups(model, weight_decay=0.3), lr=0.1, momentum=0.5)
    load_optimizer_state(optimizer, saved)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    for index, parameter in enumerate((model.weight, model.bias)):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], saved["state"][index]["momentum_buffer"])


def test_load_optimizer_state_refuses_that_of_another():
    lars = stepped(LARS)
    for other in (stepped(torch.optim.SGD, momentum=0.9), stepped(LARS, momentum_form="lr_outside")):
        with pytest.raises(ValueError, match=naming("momentum_form ", " lr_inside in the checkpoint")):
            load_optimizer_state(other, lars.state_dict())
    with pytest.raises(ValueError, match=naming("0.bias ", "model.frozen")):
        load_optimizer_state(stepped(LARS, nn.Sequential(nn.Linear(2, 2))), lars.state_dict())


@pytest.mark.parametrize(("ours", "theirs"), [(LAMB, torch.optim.SGD), (torch.optim.SGD, LAMB)])
def test_load_optimizer_state_takes_no_mean_of_gradients_for_a_momentum(ours, theirs):
    with pytest.raises(ValueError, match=naming("momentum", "squares")):
        load_optimizer_state(stepped(ours), stepped(theirs).state_dict())


def test_load_optimizer_state_lets_adamw_go_on_from_lambs_means():
    """The same means of the same gradients, under the same names."""
    saved = stepped(LAMB).state_dict()
    optimizer = stepped(torch.optim.AdamW)
    load_optimizer_state(optimizer, saved)
    for index, state in enumerate(optimizer.state.values()):
        assert {k: torch.equal(v, saved["state"][index][k]) for k, v in state.items()} == dict.fromkeys(state, True)


def test_param_groups_let_all_decay_and_adapt_where_none_is_excluded():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    all_of_them, none = param_groups(model, weight_decay=0.5, exclude_bias_and_norm=False)
    assert all_of_them["names"] == [name for name, _ in model.named_parameters()]
    assert (all_of_them["weight_decay"], all_of_them["adapt"]) == (0.5, True)
    assert none["params"] == []


def test_param_groups_have_the_factor_of_the_first_pattern_that_matches():
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "fc": nn.Linear(2, 2)})
    factors = {"fc.*": 2, "body.*": 0.5}
    groups = param_groups(model, weight_decay=0.1, bias_lr_factor=4.0, lr_factors=factors)
    assert [(g["names"], g["weight_decay"], g["lr_factor"]) for g in groups] == [
        (["body.weight"], 0.1, 0.5),
        (["fc.weight"], 0.1, 2.0),
        (["norm.weight"], 0.0, 1.0),
        (["body.bias"], 0.0, 2.0),
        (["norm.bias"], 0.0, 4.0),
        (["fc.bias"], 0.0, 8.0),
    ]
    named = dict(model.named_parameters())
    assert all(named[n] is p for g in groups for n, p in zip(g["names"], g["params"], strict=True))


@pytest.mark.parametrize("factors", [{"head.*": 1.0}, {"*": 0.1, "1.*": 1.0}, {"0.*": 1.0}])
def test_param_groups_refuse_a_pattern_that_decides_for_nothing(factors):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    idle = [*factors][-1]
    with pytest.raises(ValueError, match=naming("lr_factors", repr(idle), "1.weight to 1.bias")):
        param_groups(model, weight_decay=0.1, lr_factors=factors)


def test_load_optimizer_state_refuses_other_groups():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one = torch.optim.SGD(param_groups(model, weight_decay=0.1), lr=0.1)
    other = torch.optim.SGD(param_groups(model, weight_decay=0.1, lr_factors={"1.*": 2}), lr=0.1)
    with pytest.raises(ValueError, match=naming("groups", "factors")):
        load_optimizer_state(one, other.state_dict())
