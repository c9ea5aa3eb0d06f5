"""Models whose weights are not plain fp32 parameters train as torch trains them, or are refused in one line."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from error_texts import naming
from torch import Tensor, nn

from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import CheckpointError, ConfigError
from bigbatch.tools.tune.few_steps import few_steps
from bigbatch.trainer.build.parts import make_parts, make_precision
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.checkpoint.weights import evaluated_weights, load_weights_
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.inference.folding import fold_norms, for_inference, num_norms
from bigbatch.trainer.inference.plain_model import make_plain_model
from bigbatch.trainer.models.exchange import heads_of
from bigbatch.trainer.models.foreign import make_foreign
from bigbatch.trainer.step.precision import Precision
from tests.laws.foreign_models import COMPUTED, WithComputedWeights

HERE = "tests.unit.trainer.build.test_own_weights"
CPU = torch.device("cpu")
MASK = [0.0, -torch.inf, 0.0, 0.0]


class Counter(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}


class Own(nn.Module):
    """Two layers, and what a test adds by its name."""

    def __init__(self, num_classes: int, *, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.first = nn.Conv2d(3, 4, 3, stride=4)
        self.head = nn.Linear(4, num_classes)
        getattr(self, f"add_{how}", lambda: None)()

    def add_mask(self) -> None:
        self.register_buffer("mask", torch.tensor(MASK))
        self.unset = nn.Parameter(torch.tensor([torch.nan, -torch.inf]), requires_grad=False)

    def add_tied(self) -> None:
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def add_kinds(self) -> None:
        self.order = nn.Parameter(torch.tensor([3, 2, 1, 0]), requires_grad=False)
        self.kept = nn.Parameter(torch.ones(4, dtype=torch.bool), requires_grad=False)
        self.small = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def add_half(self) -> None:
        self.half()

    def add_sparse(self) -> None:
        self.rows = nn.Embedding(5, 4, sparse=True)

    def add_complex(self) -> None:
        self.filters = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def add_float64(self) -> None:
        self.double()

    def add_float8(self) -> None:
        self.scales = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))

    def add_meta(self) -> None:
        self.empty = nn.Linear(2, 2, device="meta")

    def add_state(self) -> None:
        self.counter = Counter()

    def add_slice(self) -> None:
        self.part = nn.Parameter(torch.ones(4, 8)[:, :3])

    def add_expanded(self) -> None:
        self.register_buffer("same", torch.ones(1).expand(4))

    def add_rows(self) -> None:
        self.register_buffer("table", torch.eye(4).to_sparse())

    def forward(self, images_BCHW: Tensor) -> Tensor:
        found = self.first(images_BCHW).relu().mean((2, 3))
        if self.how == "mask":
            found = (found + self.mask.to(found.dtype)).softmax(1)
        if self.how == "tied":
            found = self.b(self.a(found).relu())
        if self.how == "kinds":
            found = found[:, self.order] * self.kept * self.small.to(found.dtype) * self.turn.real.to(found.dtype)
        if self.how == "sparse":
            found = found + self.rows(torch.arange(len(found)) % 5)
        if self.how == "wide":
            found = found * torch.ones(4, dtype=torch.float64)
        logits_BK: Tensor = self.head(found)
        return logits_BK.to(torch.complex64) if self.how == "complex_logits" else logits_BK


def config_of(model: str, how: str, *words: str) -> Config:
    keys = ["data.loader=synthetic", "data.num_synthetic_samples=64", "data.num_classes=7", "data.image_size=16"]
    keys += ["batch.global_batch_size=8", "batch.microbatch_size=4", "batch.bn_span=4", "run.epochs=1"]
    keys += [
        "schedule.warmup_epochs=0",
        "schedule.end_lr=0",
        "optimizer.label_smoothing=0",
        "run.divergence_steps=null",
    ]
    keys += ["schedule.base_lr=0.5", "optimizer.name=sgd", "optimizer.momentum=0", "optimizer.options=null"]
    keys += [f"model.name={model}", f"model.options={{how: {how}}}", "optimizer.precision=fp32", *words]
    return load_config(["--config", "quickstart", *(f"--{key}" for key in keys)])


def train(config: Config, make: Callable[[], nn.Module], *, steps: int = 3) -> tuple[Any, nn.Module, list[float]]:
    """Train as bigbatch does, and the same microbatches by torch's SGD in fp64; the run's state, torch's model, LRs."""
    torch.manual_seed(config.run.seed)
    theirs = make().double().train()
    seen: list[tuple[Tensor, Tensor]] = []
    with few_steps(config, connect(env=ALONE), num_steps=steps, say=print) as (parts, run):
        loss = parts.loss
        images: list[Tensor] = []
        parts.model.register_forward_pre_hook(lambda _, inputs: images.append(inputs[0].clone()))

        def watched(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
            seen.append((images[-1], labels_B))
            return loss(logits_BK, labels_B)

        object.__setattr__(parts, "loss", watched)
        rates = [parts.schedule(step) for step in range(steps)]
        run(lambda record: None)
        state = {
            "model": {name: tensor.clone() for name, tensor in parts.precision.model_state().items()},
            "average": {name: tensor.clone() for name, tensor in parts.average_state(steps).items()},
            "config": dump_config(config),
        }
    decay = config.optimizer.weight_decay
    named = dict(theirs.named_parameters())
    for step, rate in enumerate(rates):
        theirs.zero_grad()
        for images_BCHW, labels_B in seen[2 * step : 2 * step + 2]:
            (F.cross_entropy(theirs(images_BCHW.double()), labels_B, reduction="sum") / 8).backward()
        with torch.no_grad():
            for name, parameter in named.items():
                if parameter.grad is not None:
                    is_vector = parameter.dim() < 2 or name.endswith(("weight_g", "weight.original0"))
                    grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    parameter -= rate * (grad + (0 if is_vector else decay) * parameter)
    return state, theirs, rates


@pytest.mark.parametrize("how", COMPUTED)
def test_computed_weights_train_evaluate_and_fold_as_torch_does(how: str, tmp_path: Path) -> None:
    config = config_of("tests.laws.foreign_models.WithComputedWeights", how, "optimizer.weight_decay=0.1")
    state, theirs, _ = train(config, lambda: WithComputedWeights(7, how=how))
    expected = theirs.state_dict()
    assert state["model"].keys() == expected.keys()
    for name, tensor in expected.items():
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(state["model"][name].double(), tensor, rtol=1e-4, atol=1e-5, msg=name)
    torch.save(state["model"], tmp_path / "weights.pt")
    plain, _ = make_plain_model(config, weights=tmp_path / "weights.pt")
    theirs.load_state_dict(state["model"])
    images_BCHW = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        logits_BK = theirs.eval()(images_BCHW.double())
        for model in (for_inference(plain, device=CPU), fold_norms(plain), copy.deepcopy(plain)):
            torch.testing.assert_close(model(images_BCHW).double(), logits_BK, rtol=1e-4, atol=1e-5)
            assert num_norms(model) == 1, "a weight that is computed cannot take a norm"


@pytest.mark.parametrize("how", ["sparse", "kinds", "tied", "mask"])
def test_other_kinds_of_parameters_train_as_torch_trains_them(how: str) -> None:
    config = config_of(f"{HERE}.Own", how, "optimizer.weight_decay=0.1")
    state, theirs, _ = train(config, lambda: Own(7, how=how))
    for name, tensor in theirs.state_dict().items():
        ours, is_real = state["model"][name], tensor.dtype == torch.float64
        torch.testing.assert_close(ours.double() if is_real else ours, tensor, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert is_real or ours.dtype == tensor.dtype


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", ["mask", "tied", "kinds", "half"])
def test_checkpoints_of_unusual_parameters_are_evaluated_with_the_average(
    how: str, precision: str, tmp_path: Path
) -> None:
    """An average of -inf would be NaN, and a tied weight's second name must not bring back what it was."""
    average = ("optimizer.ema_decay=0.9", "optimizer.ema_every_steps=1", f"optimizer.precision={precision}")
    config = config_of(f"{HERE}.Own", how, *average)
    with few_steps(config, connect(env=ALONE), num_steps=3, say=print) as (parts, run):
        run(lambda record: None)
        found = parts.average_state(3)
        state = {"model": parts.precision.model_state(), "average": found}
        torch.save({"model": evaluated_weights(state)}, tmp_path / "weights.pt")
    assert {"first.weight", "first.bias", "head.weight", "head.bias"} <= found.keys()
    assert not {"mask", "unset", "order", "kept", "small", "turn"} & found.keys()
    assert not torch.equal(found["head.weight"], state["model"]["head.weight"])
    plain, _ = make_plain_model(config, weights=tmp_path / "weights.pt")
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, {**state["model"], **found}[name], rtol=0, atol=0, equal_nan=True)
        assert tensor.dtype not in (torch.float16, torch.bfloat16)
    if how == "tied":
        assert torch.equal(plain.b.weight, found["a.weight"]), "in fp32, unrounded"
    images_BCHW = torch.randn(2, 3, 16, 16)
    assert for_inference(plain, device=CPU)(images_BCHW).isfinite().all()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("complex", ("filters is complex64", "view_as_real")),
        ("float64", ("first.weight is float64", ".float()")),
        ("float8", ("scales is float8_e4m3fn",)),
        ("meta", ("empty.weight has no values", "meta device")),
        ("state", ("counter._extra_state", "of type dict")),
        ("rows", ("table is quantized or sparse",)),
        ("slice", ("part does not fill its memory", ".clone()")),
        ("expanded", ("same does not fill its memory", ".clone()")),
        ("complex_logits", ("dtype complex64", "a logit for each")),
        ("wide", ("images of 16 x 16", "images and weights are float32 here (optimizer.precision)")),
    ],
)
def test_weights_that_would_lose_digits_or_their_values_are_refused(how: str, named: tuple[str, ...]) -> None:
    config, alone = config_of(f"{HERE}.Own", how), connect(env=ALONE)
    plan = make_plan(config, alone, num_samples=64, first_step=0)
    with pytest.raises(ConfigError, match=naming(f"model.name={HERE}.Own", *named)) as refused:
        make_parts(config, alone, plan=plan, tuned=None).model(torch.zeros(4, 3, 16, 16))
    assert "\n" not in str(refused.value)


def test_weights_that_are_frozen_are_not_refused() -> None:
    model = Own(7, how="complex")
    model.filters.requires_grad_(False)
    make_precision(config_of(f"{HERE}.Own", "plain", "optimizer.precision=bf16"), model, device=CPU)
    assert (model.filters.dtype, model.first.weight.dtype) == (torch.complex64, torch.bfloat16)
    with pytest.raises(ValueError, match=naming("filters is complex64", "view_as_real")):
        Precision(Own(7, how="complex"), name="fp32", device=CPU)


@pytest.mark.parametrize(
    ("how", "name", "value", "is_refused"),
    [
        ("mask", "mask", torch.inf, False),  # any mask
        ("mask", "mask", torch.nan, True),
        ("mask", "unset", torch.inf, True),  # not the one that the model starts with
        ("mask", "first.weight", -torch.inf, True),
        ("plain", "head.bias", torch.nan, True),
    ],
)
def test_weights_that_are_damaged_are_refused_and_masks_are_not(
    how: str, name: str, value: float, is_refused: bool, tmp_path: Path
) -> None:
    config, path = config_of(f"{HERE}.Own", how), tmp_path / "w.pt"
    model = Own(7, how=how)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    torch.save(state, path)
    load_weights_(model, path, config=config)
    state[name].view(-1)[0] = value
    torch.save(state, path)
    if is_refused:
        with pytest.raises(CheckpointError, match=naming(path, f"{name} holds values that are not finite")):
            load_weights_(model, path, config=config)
    else:
        load_weights_(model, path, config=config)
        assert model.mask[0] == value


@pytest.mark.parametrize("how", COMPUTED)
def test_new_head_of_computed_weights_and_init_that_cannot_set_them(how: str, tmp_path: Path) -> None:
    options = {"how": how}
    path = tmp_path / "w.pt"
    name = "tests.laws.foreign_models.WithComputedWeights"
    torch.save(WithComputedWeights(3, how=how).state_dict(), path)
    model = make_foreign(name, num_classes=7, norm=nn.BatchNorm2d, options=options)
    assert heads_of(model) == ["head"]
    config = config_of(name, how)
    of_classes = ("head.bias has shape [3]",) if how == "orthogonal" else ("3 classes and data.num_classes is 7",)
    with pytest.raises(CheckpointError, match=naming(path, *of_classes)):
        load_weights_(model, path, config=config)
    assert not load_weights_(model, path, config=config, new_head=True).has_head
    with pytest.raises(ConfigError, match=naming("convolution computes from others", "weight_norm", "null")):
        make_parts(config_of(name, how, "model.init=fan_in"), connect(env=ALONE), plan=None, tuned=None)  # type: ignore[arg-type]
