"""Models of other packages: found, made, with ghost batch norm, compiled; and refused where they do not go."""

import copy
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from bigbatch.errors import ConfigError
from bigbatch.trainer.inference.folding import fold_norms, num_norms
from bigbatch.trainer.models.foreign import make_foreign, require_logits_, take_norms_
from bigbatch.trainer.models.libraries import library_model
from bigbatch.trainer.models.norm import GhostBatchNorm2d, MicrobatchStatistics, flatten_running_statistics
from bigbatch.trainer.models.regions import compile_regions_, recompute_, restore_regions_
from bigbatch.trainer.step.reproducible import refuse_own_state
from tests.laws.foreign_models import WithAttention, WithBatchNorm

GHOST = partial(GhostBatchNorm2d, bn_span=2, ghosts_per_step=2)
NORMED = "tests.laws.foreign_models.WithBatchNorm"


def make(name: str, **options: Any) -> nn.Module:
    return make_foreign(name, num_classes=7, norm=GHOST, options=options)


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18", "timm:resnet18.a1_in1k"])
def test_foreign_model_of_a_library_has_its_names_and_ghost_batch_norms(name: str) -> None:
    with torch.device("meta"):
        model = make(name)
        plain = make_foreign(name, num_classes=7, norm=nn.BatchNorm2d, options={})
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert [type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)] == [GhostBatchNorm2d] * 20
    assert model.get_parameter("fc.weight").shape == (7, 512)


def test_foreign_model_takes_options_and_its_weights_are_those_of_the_seed() -> None:
    torch.manual_seed(0)
    ours = make(NORMED, width=3)
    torch.manual_seed(0)
    theirs = WithBatchNorm(7, width=3)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    norms = [m for m in ours.modules() if isinstance(m, GhostBatchNorm2d)]
    assert [(m.eps, m.momentum) for m in norms] == [(1e-3, 0.2)] * 2


def test_foreign_norm_keeps_parameters_that_are_shared_or_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    first = model[0]
    model.append(first)
    weight = first.weight
    take_norms_(model, GHOST)
    assert model[0] is model[2]
    assert model[0].weight is weight is model[1].weight
    assert not model[0].bias.requires_grad


def test_foreign_norm_of_timm_keeps_its_activation() -> None:
    """With one ghost batch the model is timm's own, in training and, with folded norms, in evaluation."""
    theirs = library_model("timm:tf_efficientnet_b0")(num_classes=7).double()
    ours = copy.deepcopy(theirs)
    take_norms_(ours, lambda channels: GhostBatchNorm2d(channels, bn_span=4, ghosts_per_step=1).double())
    assert {type(m) for m in ours.modules() if isinstance(m, nn.BatchNorm2d)} == {GhostBatchNorm2d}
    images_BCHW = torch.randn(4, 3, 33, 33, dtype=torch.float64)
    results = []
    for model in (theirs, ours):
        torch.manual_seed(0)  # of stochastic depth
        logits_BK = model(images_BCHW)
        logits_BK.square().sum().backward()
        in_training = logits_BK.detach(), *(parameter.grad for parameter in model.parameters())
        with torch.no_grad():
            results.append((*in_training, model.eval()(images_BCHW)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)
    folded = fold_norms(ours)
    assert num_norms(folded) == 0
    with torch.no_grad():
        torch.testing.assert_close(folded(images_BCHW), results[0][-1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "odd",
    [
        nn.BatchNorm1d(3),
        nn.SyncBatchNorm(3),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3, momentum=None),
        nn.BatchNorm2d(3, momentum=0.3),
        nn.InstanceNorm2d(3, track_running_stats=True),
    ],
    ids=repr,
)
def test_foreign_norm_that_would_depend_on_the_division_is_refused(odd: nn.Module) -> None:
    model = nn.Sequential(nn.Sequential(odd), nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match=naming(f"0.0 is a {type(odd).__name__}", "torch.nn.BatchNorm2d")):
        take_norms_(model, GHOST)


def test_foreign_norms_of_the_sample_stay() -> None:
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.InstanceNorm2d(3), nn.LayerNorm(3))
    before = [*model]
    take_norms_(model, GHOST)
    assert all(a is b for a, b in zip(model, before, strict=True))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("no_such_package.Net", ("'no_such_package'", "install the package that has it")),
        ("tests.laws.foreign_models.Net", (" no Net;", " WithAttention", " WithBatchNorm")),
        ("math.Net", (" math ", " none")),
        ("math.pi", ("neither a class nor a function",)),
        ("builtins.dict", (" a dict ", "torch.nn.Module")),
        ("subprocess.Popen", (" a Popen ", "torch.nn.Module")),
        *((name, ("own package",)) for name in ("torch.hub.load", "torch.load", "timm.create_model", "os.system")),
        *((name, ("own package",)) for name in ("torchvision.models.get_model", "timm.models.load_checkpoint")),
        *((name, ("No module named",)) for name in ("torch.os.system", "bigbatch.files.os.system")),
        ("torch.nn.Conv2d", ("num_classes=7", "model.options={}", "'num_classes'")),
        ("torchvision:resnet81", ("torchvision:resnet18",)),
        ("torchvision:fcn_resnet50", ("torchvision has no such model",)),
        ("timm:resnet81.a1", ("timm:resnet",)),
        ("timm:resnet18.bogus", ("resnet18", "bogus")),
    ],
)
def test_foreign_model_that_cannot_be_had_is_refused(name: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=naming(f"model.name={name}", *named)) as caught, torch.device("meta"):
        make(name)
    assert "\n" not in str(caught.value)


def test_foreign_model_of_timm_says_how_to_get_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=naming("model.name=timm:resnet18", "pip install timm")):
        make("timm:resnet18")


def test_foreign_model_may_be_made_by_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("own")
    package.net = lambda *, num_classes, norm: WithBatchNorm(num_classes, width=norm)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own", package)
    assert make("own.net", norm=5).get_parameter("head.weight").shape == (7, 5)


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (lambda *, num_classes: nn.LazyLinear(num_classes), ": weight has no size yet"),
        (lambda *, num_classes: sys.exit(0), " ends Python"),  # with code 0 a job would seem to be done
    ],
)
def test_foreign_model_that_cannot_be_made_is_refused(net: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("own")
    package.net = net  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own", package)
    with pytest.raises(ConfigError, match=f"model.name=own.net{said}"):
        make("own.net")


class Pair(nn.Module):
    def forward(self, images_BCHW: Tensor) -> Any:
        return images_BCHW, images_BCHW


@pytest.mark.parametrize(("model", "given"), [(nn.Flatten(), r"\(2, 12\)"), (Pair(), "tuple")])
def test_foreign_model_that_gives_no_logits_is_refused(model: nn.Module, given: str) -> None:
    require_logits_(model, name="own.Net", num_classes=7)
    with pytest.raises(ConfigError, match=f"model.name=own.Net .*{given} .*\\(2, 7\\), .*model.options"):
        model(torch.zeros(2, 3, 2, 2))


def test_foreign_model_is_asked_for_logits_once() -> None:
    model = make(NORMED).eval()
    require_logits_(model, name=NORMED, num_classes=7)
    model(torch.zeros(2, 3, 16, 16))
    assert not model._forward_hooks


@pytest.mark.parametrize("kind", [WithBatchNorm, WithAttention])
def test_foreign_model_is_compiled_as_one_graph_in_channels_last(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    images_BCHW = torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model: Any = make(f"tests.laws.foreign_models.{kind.__name__}").to(memory_format=torch.channels_last)
        statistics_N = flatten_running_statistics(model)
        MicrobatchStatistics(model, statistics_N, take=statistics_N.lerp_)
        counter = CompileCounter()
        if is_compiled:
            compile_regions_(model, mode=None, backend=counter)
        recompute_(model, 0)
        results.append([model(images_BCHW), *(b.clone() for _, b in model.named_buffers())])
        assert counter.frame_count == is_compiled
    assert all(map(torch.equal, *results))
    restore_regions_(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("place", ["as it is imported", "as it is made"])
def test_foreign_model_of_broken_code_is_one_line_with_its_place(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of a user's is a user's: exit code 1, which no --restarts starts again."""
    text = "import nonsense here" if place == "as it is imported" else "def net(num_classes):\n    return {}['width']"
    (tmp_path / "own_broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("SyntaxError",) if place == "as it is imported" else ("KeyError: 'width'", "line 2 of", "own_broken.py")
    with pytest.raises(ConfigError, match=naming("model.name=own_broken.net", *words)) as caught:
        make("own_broken.net")
    assert "\n" not in str(caught.value)


class TwoRegions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 1), nn.Flatten())

    def regions(self) -> list[Any]:
        return [(module, "forward") for module in self]


def test_foreign_model_is_compiled_by_the_regions_that_it_states() -> None:
    model, counter = TwoRegions(), CompileCounter()
    compile_regions_(model, mode=None, backend=counter)
    model(torch.zeros(1, 3, 2, 2))
    assert counter.frame_count == 2


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, inputs_BC: Tensor) -> Tensor:
        if self.training:
            self.center.lerp_(inputs_BC.mean(0), 0.1)
        found: Tensor = self.layer((inputs_BC - self.center) * self.scale)
        return found


SPECTRAL = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 40), n_power_iterations=1)


@pytest.mark.parametrize(
    ("model", "name"), [(Centered(), "center"), (nn.Sequential(SPECTRAL), "0.parametrizations.weight.0._u")]
)
def test_own_state_is_refused_by_name_in_the_first_training_forward(model: nn.Module, name: str) -> None:
    refuse_own_state(model)
    model.eval()(torch.randn(4, 3))
    with pytest.raises(ConfigError, match=f"cannot keep {name}"):
        model.train()(torch.randn(4, 3))


def test_own_state_that_stays_is_none() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)).train()
    model.register_buffer("scale", torch.ones(2))
    refuse_own_state(model)
    model(torch.randn(4, 3))
    model.scale += 1
    model(torch.randn(4, 3))  # looked at once
