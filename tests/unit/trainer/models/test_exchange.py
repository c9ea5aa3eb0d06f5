"""Weights of torchvision and timm in our models and ours in theirs, and what does not fit is refused."""

import re
from functools import cache, partial
from typing import Any

import pytest
import torch
import torchvision
from error_texts import naming
from torch import Tensor, nn

from bigbatch.errors import CheckpointError
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.exchange import from_foreign, heads_of, partly_from_foreign, plain_tensors
from bigbatch.trainer.models.norm import GhostBatchNorm2d

timm = pytest.importorskip("timm")

ghost = partial(GhostBatchNorm2d, bn_span=2, ghosts_per_step=1)
LIBRARIES = {"torchvision": torchvision.models.get_model, "timm": timm.create_model}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def ours(name: str = "resnet18", num_classes: int = 10, **options: Any) -> nn.Module:
    return build_model(name, num_classes=num_classes, norm=ghost, **options).eval()


def scrambled(model: nn.Module) -> nn.Module:
    """In evaluation mode, norm parameters and statistics away from 0 and 1."""
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(1.0, 2.0)
        elif name.endswith("running_mean") or ("bn" in name and name.endswith(("weight", "bias"))):
            tensor.uniform_(0.2, 0.8)
    return model.eval()


def assert_same_logits(model: nn.Module, peer: nn.Module) -> None:
    images_BCHW = torch.randn(2, 3, 40, 40)
    with torch.no_grad():
        want = peer(images_BCHW)
        torch.testing.assert_close(model(images_BCHW), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "library"), [("resnet18", "torchvision"), ("resnet50", "timm")])
def test_exchange_ours_take_foreign_weights_and_foreign_models_ours(name: str, library: str) -> None:
    peer, model = scrambled(LIBRARIES[library](name, num_classes=10)), ours(name)
    model.load_state_dict(from_foreign(peer.state_dict(), model, source="their.pth"))
    assert_same_logits(model, peer)
    scrambled(model).to(memory_format=torch.channels_last)
    state = plain_tensors(model.state_dict())
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in state.values())
    peer.load_state_dict(state, strict=True)
    assert_same_logits(model, peer)


def prefixed(state: dict[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    return {"".join(prefixes) + name: tensor for name, tensor in state.items()}


@cache
def both_resnet18() -> tuple[dict[str, Tensor], nn.Module]:
    return torchvision.models.resnet18(num_classes=10).state_dict(), ours()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3, "arch": "resnet18"},
        lambda state: {"model": state, "optimizer": {}, "args": None},
        lambda state: prefixed(state, "module."),
        lambda state: prefixed(state, "_orig_mod."),
        lambda state: prefixed(state, "module.", "_orig_mod."),
        lambda state: {"state_dict": prefixed(state, "_orig_mod.", "module.")},
        lambda state: {name: t for name, t in state.items() if "num_batches" not in name},  # torchvision's of 2017
    ],
)
def test_exchange_wrappers_are_taken_off(wrap: Any) -> None:
    state, model = both_resnet18()
    found = from_foreign(wrap(state), model, source="a.pth")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def refusal(state: Any, model: nn.Module) -> str:
    with pytest.raises(CheckpointError) as caught:
        from_foreign(state, model, source="a.pth")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_exchange_other_models_are_named_by_what_differs() -> None:
    with torch.device("meta"):
        shallow, deep, bottleneck = (
            torchvision.models.get_model(name, num_classes=10).state_dict()
            for name in ("resnet18", "resnet34", "resnet50")
        )
        ours18, ours34, ours50 = (ours(name) for name in ("resnet18", "resnet34", "resnet50"))
    first = "layer1.2.conv1.weight, layer1.2.bn1.weight, layer1.2.bn1.bias, ..."
    text = refusal(deep, ours18)
    assert re.search(naming("a.pth", "96 of 218", "foreign", f"({first})"), text)
    assert "missing" not in text
    text = refusal(shallow, ours34)
    missing = naming("a.pth", "80 of 218", "missing", "(layer1.2.conv1.weight, ")
    assert re.search(missing, text), "the 16 counters among the 96 are not asked for"
    both = refusal(shallow, ours50)
    assert "missing (layer1.0.conv3.weight, layer1.0.bn3.weight, layer1.0.bn3.bias, ...)" in both
    assert "foreign" not in both
    del shallow["fc.bias"]
    text = refusal({**shallow, "fc.scale": torch.ones(1)}, ours18)
    assert re.search(naming("a.pth", "1 of 122", "missing (fc.bias)", "foreign (fc.scale)"), text)
    bottleneck["layer1.0.conv1.weight"] = torch.zeros(64, 64, 3, 3)
    shapes = ("layer1.0.conv1.weight", "[64, 64, 3, 3] there", "[64, 64, 1, 1] here")
    assert re.search(naming("a.pth", *shapes, "model section"), refusal(bottleneck, ours50))


def test_exchange_alexnet_without_batch_norm_is_no_start() -> None:
    with torch.device("meta"):
        peers = torchvision.models.alexnet().state_dict()
        model = build_model("alexnet_bn", num_classes=1000, norm=ghost)
    message = refusal(peers, model)
    assert re.search(naming("a.pth", "AlexNet", "alexnet_bn"), message)
    assert "AlexNet" not in refusal(model.state_dict(), ours())


@pytest.mark.parametrize(
    ("name", "classifier", "options"),
    [
        ("resnet18", "fc.weight", {}),
        ("alexnet_bn", "classifier.6.weight", {}),
        ("resnet9", "linear.weight", {"width": 2}),
    ],
)
def test_exchange_other_classes_are_counted(name: str, classifier: str, options: dict[str, int]) -> None:
    with torch.device("meta"):
        many, few = (build_model(name, num_classes=n, norm=ghost, **options) for n in (1000, 10))
    numbers = ("1000 classes", "data.num_classes is 10:", "data.num_classes to 1000", "model.new_head true")
    assert re.search(naming(f"a.pth: {classifier} ", *numbers), refusal(many.state_dict(), few))


@pytest.mark.parametrize("classes_there", [1000, 10, None])
def test_exchange_new_head_is_the_models_own(classes_there: int | None) -> None:
    there = ours("resnet9", width=2, num_classes=classes_there or 10).state_dict()
    if classes_there is None:  # as timm saves one without classes
        del there["linear.weight"]
    model = ours("resnet9", width=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = from_foreign(there, model, source="a.pth", new_head=True)
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name] if name == "linear.weight" else there[name]) for name in found)
    other = {**there, "prep.0.weight": torch.zeros(4, 3, 3, 3)}
    with pytest.raises(CheckpointError, match=naming("a.pth", "prep.0.weight")):
        from_foreign(other, model, source="a.pth", new_head=True)


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "levit_128s", "resnet18"])
def test_exchange_new_head_has_every_classifier_that_a_timm_model_states(name: str) -> None:
    def made(num_classes: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            return timm.create_model(name, num_classes=num_classes).state_dict()

    model, heads = timm.create_model(name, num_classes=3), {"deit": 2, "levi": 2}.get(name[:4], 1)
    own = model.state_dict()
    assert len(heads_of(model)) == heads
    for num_classes in (3, 5):
        found = from_foreign(made(num_classes), model, source="a.pth", new_head=True)
        layers = {
            name.rpartition(".")[0] for name, tensor in found.items() if tensor.data_ptr() == own[name].data_ptr()
        }
        assert {*heads_of(model)} <= layers
        assert not [name for name in layers if "norm" not in name and "bn" not in name and name not in heads_of(model)]
    with pytest.raises(CheckpointError, match=naming("5 classes and data.num_classes is 3", "model.new_head true")):
        from_foreign(made(5), model, source="a.pth")


def test_exchange_new_head_may_be_a_convolution() -> None:
    many, few = (torchvision.models.squeezenet1_1(num_classes=n) for n in (7, 3))
    found = from_foreign(many.state_dict(), few, source="a.pth", new_head=True)
    assert torch.equal(found["classifier.1.weight"], few.classifier[1].weight)
    assert torch.equal(found["classifier.1.bias"], few.classifier[1].bias)
    assert torch.equal(found["features.0.weight"], many.features[0].weight)


REMEDY = "save one with torch.save(model.state_dict(), FILE)"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1, 2], "a.pth holds a list and no state_dict"),
        (torch.ones(3), "a.pth holds a Tensor and no state_dict"),
        ({}, "a.pth holds no state_dict, since it is empty"),
        ({"model": {}}, "a.pth holds no state_dict, since it is empty"),
        ({"lr": 0.1}, "a.pth holds no state_dict, since 'lr' in it is of type float"),
        ({0: torch.ones(1)}, "a.pth holds no state_dict, since 0 in it is of type Tensor"),
    ],
)
def test_exchange_messages_of_what_is_no_state_dict(state: object, message: str) -> None:
    """The room's catalogue of messages: the one test here that holds whole sentences."""
    assert refusal(state, ours()) == f"{message}: {REMEDY}"


def averaged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict of torch's AveragedModel, which counts its updates beside the weights."""
    return {"n_averaged": torch.tensor(3), **prefixed(state, "module.")}


@pytest.mark.parametrize(
    ("wrap", "average"),
    [
        (lambda state, _: {"state_dict": {**prefixed(state, "model."), "criterion.weight": torch.ones(10)}}, ""),
        (lambda state, _: {"state_dict": prefixed(state, "net._orig_mod."), "hyper_parameters": {"lr": 0.1}}, ""),
        (lambda state, other: {"state_dict": prefixed(state, "model."), "current_model_state": other}, ""),
        (lambda state, _: prefixed(state, "module.", "backbone."), ""),
        (lambda state, _: {"state": {"model": prefixed(state, "module."), "algorithms": []}, "rng": []}, ""),
        (lambda state, _: {"net": prefixed(state, "module."), "acc": 93.1}, ""),
        (lambda state, _: {"model_state_dict": state, "optimizer_state_dict": {"state": {0: {}}}}, ""),
        (lambda state, other: {"model": state, "momentum": other}, ""),
        (lambda state, _: averaged(state), ""),
        (lambda state, other: {"model": other, "model_ema": averaged(state)}, "model_ema.module"),
        (lambda state, other: {"optimizer": {"exp_avg": other}, "model": state}, ""),
        (lambda state, other: {"state_dict": other, "state_dict_ema": state, "epoch": 3}, "state_dict_ema"),
        (lambda state, other: {**prefixed(other, "model."), **prefixed(averaged(state), "ema_model.")}, "ema_model"),
        (lambda state, other: {"ema": {"decay": 0.9}, "model": state, "avgpool": {"conv1.weight": other}}, ""),
    ],
)
def test_exchange_finds_weights_below_any_keys_and_prefixes(wrap: Any, average: str) -> None:
    state, model = both_resnet18()
    said: list[str] = []
    found = from_foreign(
        wrap(state, {name: 0 * t for name, t in state.items()}), model, source="a.pth", say=said.append
    )
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert [line for line in said if average in line] == said
    assert len(said) == (average != "")


def test_exchange_of_a_prefix_has_the_messages_of_the_names_without() -> None:
    state, model = both_resnet18()
    with torch.device("meta"):
        deep = torchvision.models.resnet34(num_classes=10).state_dict()
        classes = torchvision.models.resnet18(num_classes=7).state_dict()
    assert "foreign (layer1.2.conv1.weight, " in refusal({"state_dict": prefixed(deep, "net.")}, model)
    assert "fc.weight has 7 classes" in refusal(prefixed(classes, "model."), model)
    assert "1 of 123 tensors are foreign (aux)" in refusal(prefixed({**state, "aux": torch.ones(1)}, "net."), model)
    for twice, places in (
        ({"student": state, "teacher": dict(state)}, "(student, teacher)"),
        ({**prefixed(state, "online."), **prefixed(state, "target.")}, "(online, target)"),
    ):
        assert f"a.pth holds weights of this model several times {places}" in refusal(twice, model)
    several = [1, {"state_dict": [state]}, {0: state}, {"." * 9999: torch.ones(1)}, {"a": {"b": {"c": {"d": {}}}}}]
    for odd in several:
        assert "no state_dict" in refusal(odd, model) or "missing" in refusal(odd, model)
    nested: dict[str, Any] = {"model": state}
    for _ in range(9):  # deeper than any script nests them
        nested = {"model": nested}
    assert "no state_dict" in refusal(nested, model)


def test_exchange_takes_parts_and_all_but_the_head_below_a_prefix() -> None:
    state, model = both_resnet18()
    backbone = {f"backbone.{name}": tensor for name, tensor in state.items() if not name.startswith("fc.")}
    found = from_foreign({"state_dict": backbone}, model, source="a.pth", new_head=True)
    assert torch.equal(found["layer4.1.conv2.weight"], state["layer4.1.conv2.weight"])
    said: list[str] = []
    found = partly_from_foreign(backbone, model, source="a.pth", patterns=["conv1.*", "layer1.*"], say=said.append)
    assert torch.equal(found["conv1.weight"], state["conv1.weight"])
    assert torch.equal(found["bn1.bias"], model.state_dict()["bn1.bias"])
    assert re.search(naming("25 of 122 tensors are from a.pth", "not used (bn1.weight, "), said[0])
