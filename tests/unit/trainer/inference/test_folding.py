"""A folded model is the same function, in half precision and compiled as well; the rate of a forward; the commands."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
from error_texts import naming
from torch import Tensor, nn

from bigbatch.cli import main
from bigbatch.errors import ComputeError
from bigbatch.parts import load
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.inference.folding import compile_, fold_norms, for_inference, forward_rate, num_norms
from bigbatch.trainer.machine import host
from bigbatch.trainer.models import MODELS
from tests.laws.foreign_models import WithBatchNorm

CPU = torch.device("cpu")
PAGE = {"celu_alpha": 0.3, "norm_scale": 0.25, "is_whitened": True}
FORMS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    # name: (model, options, norms, norms that a max-pool parts from their convolution)
    "resnet18": ("resnet18", {}, 20, 0),
    "resnet50": ("resnet50", {}, 53, 0),
    "blurred": ("resnet18", {"blurpool": True}, 20, 0),
    "alexnet_bn": ("alexnet_bn", {}, 6, 1),
    "resnet9": ("resnet9", {"width": 4}, 8, 3),
    "pool last": ("resnet9", {"width": 4, "pool_first": False}, 8, 0),
    "bag of tricks": ("resnet9", {"width": 4, **PAGE}, 8, 3),
}


def trained(name: str) -> nn.Module:
    """With norms that are not the identity, some of their scales negative."""
    torch.manual_seed(0)
    model, options, _, _ = FORMS[name]
    built = load(MODELS[model])(num_classes=10, **options).eval()
    for module in built.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.1, 0.1)
            if isinstance(module.weight, nn.Parameter):
                nn.init.uniform_(module.weight, -0.3, 1.0)
    return built


@torch.no_grad()
def logits(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    return model(images_BCHW)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in ("resnet50", "blurred", "alexnet_bn") else name
        for name in FORMS
    ],
)
def test_folding_leaves_the_function_as_it_is(name: str) -> None:
    model, images_BCHW = trained(name), torch.randn(2, 3, 64, 64)
    _, _, norms, kept = FORMS[name]
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    folded = fold_norms(model)
    assert (num_norms(model), num_norms(folded)) == (norms, kept)
    want_BK, got_BK = logits(model, images_BCHW), logits(folded, images_BCHW)
    largest = float(want_BK.abs().max())
    assert float(want_BK.std()) > 1e-3
    # each convolution's weights and sums are rounded again
    assert float((got_BK - want_BK).abs().max()) <= (norms + 1) * torch.finfo(torch.float32).eps * largest
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items()), "the model was changed"

    double, images = model.double(), images_BCHW.double()
    want_BK = logits(double, images)
    torch.testing.assert_close(logits(fold_norms(double), images), want_BK, rtol=0, atol=1e-12 * largest)


def test_folding_a_folded_convolution_is_the_closed_form() -> None:
    """Weight w s, bias b - m s, where s = g / sqrt(v + eps)."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1, eps=0.25)).double().eval()
    nn.init.constant_(model[0].weight, 3.0)
    for tensor, value in zip(model[1].state_dict().values(), (4.0, 5.0, 6.0, 2.0), strict=False):
        tensor.fill_(value)  # g, b, m, v: s = 4 / sqrt(2.25)
    folded = fold_norms(model)
    scale = 4 / 1.5
    assert folded[0].weight.item() == pytest.approx(3 * scale, rel=1e-15)
    assert folded[0].bias.item() == pytest.approx(5 - 6 * scale, rel=1e-15)


class Shared(nn.Module):
    """A convolution that others read, too, or that works twice: neither may be changed."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.twice = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), twice

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features = self.conv(images_BCHW)
        return self.conv(self.bn(features)) if self.twice else self.bn(features) + features


@pytest.mark.parametrize("twice", [False, True])
def test_folding_a_convolution_with_other_readers_keeps_its_norm(twice: bool) -> None:
    assert num_norms(fold_norms(Shared(twice=twice).eval())) == 1


class Standardized(nn.Conv2d):
    def forward(self, images_BCHW: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / self.weight.std((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(images_BCHW, weight, self.bias, self.stride, self.padding)


@pytest.mark.parametrize(
    ("convolution", "num_kept"),
    [
        (Standardized(3, 4, 3), 1),
        (nn.Conv2d(3, 4, 7, stride=4, padding=3, padding_mode="reflect"), 0),
        (nn.Conv2d(3, 6, (1, 9), dilation=2, groups=3), 0),
        (nn.Conv2d(3, 4, 32, stride=32), 0),
    ],
)
def test_folding_leaves_a_convolution_that_does_not_use_its_weight_as_it_is(
    convolution: nn.Conv2d, num_kept: int
) -> None:
    norm = nn.BatchNorm2d(convolution.out_channels)
    nn.init.uniform_(norm.weight, -2, 2)
    model, images_BCHW = nn.Sequential(convolution, norm).eval(), torch.randn(2, 3, 64, 64)
    folded = fold_norms(model)
    assert num_norms(folded) == num_kept
    torch.testing.assert_close(logits(folded, images_BCHW), logits(model, images_BCHW), rtol=1e-4, atol=1e-4)


class Branching(nn.Module):
    def forward(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW if images_BCHW.shape[2] < 3 else -images_BCHW


class Counting(nn.Module):
    def forward(self, images_BCHW: Tensor) -> Tensor:
        return sum(images_BCHW[number] for number in range(len(images_BCHW)))


@pytest.mark.parametrize("kind", [Branching, Counting])
def test_folding_of_a_model_that_cannot_be_traced_is_one_line(kind: type[nn.Module]) -> None:
    with pytest.raises(ComputeError, match=naming("norms cannot be folded: ", "leave out --fold")) as caught:
        fold_norms(kind().eval())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "dtype"), [("resnet18", torch.bfloat16), ("bag of tricks", torch.float16)])
def test_folding_half_precision_holds_all_weights_but_norms(name: str, dtype: torch.dtype) -> None:
    model, images_BCHW = trained(name), torch.randn(8, 3, 64, 64)
    half = for_inference(model, device=CPU, dtype=dtype, fold=True)
    norms = [module for module in half.modules() if isinstance(module, nn.BatchNorm2d)]
    in_norms = {id(p) for norm in norms for p in norm.parameters()}
    assert all(p.dtype == (torch.float32 if id(p) in in_norms else dtype) for p in half.parameters())
    want_BK, got_BK = logits(model, images_BCHW), logits(half, images_BCHW.to(dtype)).float()
    # a rounding of eps / 2 in each of at most 21 layers, adding up as random signs do, with a margin of 4
    bound = 4 * torch.finfo(dtype).eps / 2 * 21**0.5
    assert float((got_BK - want_BK).norm() / want_BK.norm()) < bound


@pytest.mark.long
def test_folding_what_compiles_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles with dynamo alone, as one graph: a graph break would be an error."""
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda *a, **k: compile_module(*a, **k, backend="eager"))
    for name in ("bag of tricks", "blurred"):
        torch.compiler.reset()
        model, images_BCHW = trained(name), torch.randn(2, 3, 64, 64)
        want_BK = logits(model, images_BCHW)
        compile_(model, images_BCHW)
        assert torch.equal(logits(model, images_BCHW), want_BK), name


class Breaking(nn.Module):
    def forward(self, images_BCHW: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return images_BCHW


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch({"cpp.cxx": ("nowhere-g++",)}):
        yield


@pytest.mark.long
@pytest.mark.usefixtures("no_compiler")
def test_folding_a_compile_that_fails_is_one_line() -> None:
    with pytest.raises(ComputeError, match=r"compile: .+; .*--compile$") as caught:
        compile_(Breaking().eval(), torch.zeros(1))
    assert "\n" not in str(caught.value)
    with pytest.raises(ComputeError, match=naming("nowhere-g++", "--compile")):
        compile_(nn.Tanh().eval(), torch.zeros(2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("pause_seconds", [0.002, 0.3])
def test_folding_the_rate_is_that_of_the_forward(pause_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: len(calls) * pause_seconds))

    def forward() -> None:
        calls.append(None)

    assert forward_rate(forward, num_images=7, device=CPU) == pytest.approx(7 / pause_seconds)
    assert 6 <= len(calls) <= 103


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=1, val_per_class=2, side_pixels=(50, 60))
    return root


@pytest.fixture
def start(data: Path, tmp_path: Path) -> list[str]:
    """The words that name a model's weights, and the data."""
    torch.save(trained("resnet9").state_dict(), tmp_path / "weights.pt")
    keys = ["--model.options.width=4", f"--data.root={data}", "--data.loader=torchvision", "--data.image_size=32"]
    sizes = ["--batch.microbatch_size=8", "--batch.bn_span=8"]
    return ["--config", "quickstart", "--weights", str(tmp_path / "weights.pt"), *keys, *sizes]


@pytest.mark.long
def test_folding_evaluate_states_the_speed_and_scores_the_same(
    start: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    records, lines = [], []
    for options in ([], ["--fold"], ["--fold", "--optimizer.precision=bf16"]):
        assert main(["evaluate", *start, *options, "--json"]) == 0
        *told, record = capsys.readouterr().out.splitlines()
        records.append(json.loads(record))
        lines += [line for line in told if line.startswith("speed: ")]
    plain, folded, half = records
    assert folded["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert half["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert [(each["num_folded"], each["num_norms"]) for each in records] == [(0, 8), (5, 8), (5, 8)]
    for record in records:
        assert record["images_per_second"] == pytest.approx(record["count"] / record["seconds"])
        assert record["model_images_per_second"] > 0
    assert len(lines) == 3
    assert lines[0].endswith(" (fp32)")
    assert lines[2].endswith(" (bf16, 5 of 8 norms folded)")


@pytest.mark.long
def test_folding_evaluate_compiles(start: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with few kernels: C++ takes seconds for each."""
    torch.compiler.reset()
    torch.save(WithBatchNorm(10).state_dict(), tmp_path / "weights.pt")
    small = [word for word in start if "width" not in word] + [f"--model.name={WithBatchNorm.__module__}.WithBatchNorm"]
    found = []
    for options in ([], ["--compile"]):
        assert main(["evaluate", *small, *options, "--json"]) == 0
        *told, record = capsys.readouterr().out.splitlines()
        found.append(json.loads(record))
    (line,) = (line for line in told if line.startswith("speed: "))
    assert line.endswith(" (fp32, compiled)")
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
    assert [each["compiled"] for each in found] == [False, True]


@pytest.mark.long
def test_folding_export_folds(start: list[str], tmp_path: Path) -> None:
    out = tmp_path / "a.pt2"
    assert main(["export", *start, "--fold", "--format", "torch_export", "--out", str(out)]) == 0
    facts = json.loads(Path(f"{out}.json").read_text())
    assert (facts["num_folded"], facts["num_norms"]) == (5, 8)
    assert facts["largest_difference"] < 1e-5
    assert sum("batch_norm" in str(node.target) for node in torch.export.load(out).graph.nodes) == 3
