"""Half-precision weights around fp32 masters, autocast, loss scaling, and what a checkpoint holds of them."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from error_texts import naming
from one_rank import alone
from torch import Tensor, nn

from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.errors import CommError
from bigbatch.trainer.config.sections import SCALED
from bigbatch.trainer.machine.host import set_tf32
from bigbatch.trainer.models.norm import GhostBatchNorm2d
from bigbatch.trainer.optim.lamb import LAMB
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.shampoo import Shampoo
from bigbatch.trainer.step.loss_scale import Scaling, underflow_fraction
from bigbatch.trainer.step.precision import AUTOCAST_DTYPES, COMPUTE_DTYPES, Precision

CPU = torch.device("cpu")
HALVES = ("bf16", "fp16")


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def make_precision(model: nn.Module, *, name: str) -> Precision:
    """Make the precision as the config does: fp16 has a loss scale."""
    scaling = Scaling(initial=65536.0, growth_steps=2) if name in SCALED else None
    return Precision(model, name=name, device=CPU, scaling=scaling)


def step(
    model: nn.Module,
    precision: Precision,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    skip_1: Tensor | None = None,
) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    with precision.forward():
        outputs = model(images.to(precision.compute_dtype)).float()
    precision.backward(outputs.square().mean())
    precision.update_(optimizer, skip_1=skip_1)


@pytest.mark.parametrize("name", HALVES)
def test_precision_halves_weights_and_leaves_norm_in_fp32(name: str) -> None:
    model = small_model()
    precision = make_precision(model, name=name)
    dtypes = {key: p.dtype for key, p in model.named_parameters()}
    half = COMPUTE_DTYPES[name]
    assert {k for k, d in dtypes.items() if d == half} == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert {k for k, d in dtypes.items() if d == torch.float32} == {"1.weight", "1.bias"}
    for key, parameter in small_model().named_parameters():
        assert precision.masters[key].dtype == torch.float32
        assert torch.equal(precision.masters[key], parameter), "the unrounded weights"


@pytest.mark.parametrize("name", ["fp32", "tf32", *AUTOCAST_DTYPES])
def test_fp32_masters_are_the_parameters(name: str) -> None:
    model = small_model()
    precision = make_precision(model, name=name)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(precision.masters[key] is p for key, p in model.named_parameters())


@pytest.mark.parametrize("form", [lambda one: one, lambda one: [1, one], lambda one: {"a": [one]}])
def test_state_is_finite_in_lists_and_dicts_too(form: Callable[[Tensor], object]) -> None:
    precision = make_precision(nn.Linear(1, 1), name="fp32")
    for value, is_finite in ((torch.ones(2), True), (torch.tensor(torch.inf), False)):
        assert precision.all_finite([{"kept": form(value), "step": 1.0, "empty": None}, {}]) is is_finite


def test_masters_keep_an_update_smaller_than_half_precision() -> None:
    """The reason for masters: 100 updates of 1e-5 each vanish in bf16 beside a weight of 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    precision = make_precision(model, name="bf16")
    optimizer = torch.optim.SGD(precision.masters.values(), lr=1e-5)
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        precision.update_(optimizer)
    assert precision.masters["weight"].item() == pytest.approx(1 - 1e-3, abs=6e-6), "100 roundings at most"
    assert model.weight.item() == pytest.approx(1 - 1e-3, abs=2**-8), "the half weight follows its master"


def test_precision_fp16_update_equals_fp32_within_half_precision() -> None:
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    results = {}
    for name in COMPUTE_DTYPES:
        model = small_model()
        precision = make_precision(model, name=name)
        optimizer = LARS(list(precision.masters.values()), lr=1.0)
        step(model, precision, optimizer, images)
        results[name] = torch.cat([m.detach().flatten() for m in precision.masters.values()])
    start = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    moved = (results["fp32"] - start).norm()
    assert torch.equal(results["tf32"], results["fp32"]), "on a CPU"
    for name, eps in (("fp16", 2**-11), ("bf16", 2**-8), ("fp16_autocast", 2**-11), ("bf16_autocast", 2**-8)):
        assert (results[name] - results["fp32"]).norm() < 20 * eps * moved, name


@pytest.mark.parametrize("name", SCALED)
def test_precision_skips_the_update_of_an_overflow_and_halves_the_scale(name: str) -> None:
    model = small_model()
    precision = make_precision(model, name=name)
    optimizer = LARS(list(precision.masters.values()), lr=1.0)
    before = {key: m.detach().clone() for key, m in precision.masters.items()}
    scale = precision.state_dict()["scale"]
    step(model, precision, optimizer, torch.full((8, 3, 8, 8), 1e30))  # no number of fp16
    assert all(torch.equal(before[key], m) for key, m in precision.masters.items())
    assert precision.figures()["loss_scale"] == scale / 2
    assert precision.figures()["overflow_steps"] == 1
    assert precision.figures()["grad_norm"] is None
    step(model, precision, optimizer, torch.randn(8, 3, 8, 8))
    assert not torch.equal(before["3.weight"], precision.masters["3.weight"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_precision_sees_a_weight_that_is_no_number(bad: float) -> None:
    precision = make_precision(small_model(), name="bf16")
    assert precision.all_finite([precision.masters])
    with torch.no_grad():
        precision.masters["3.bias"][2] = bad
    assert not precision.all_finite([precision.masters])


def shampoo(weights: list[nn.Parameter]) -> Shampoo:
    groups = ([w for w in weights if (w.dim() > 1) is is_matrix] for is_matrix in (True, False))
    return Shampoo([{"params": some, "adapt": some[0].dim() > 1} for some in groups], lr=0.1)


OPTIMIZERS = [partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True), partial(LAMB, lr=0.1), shampoo]


def same(ours: object, theirs: object) -> bool:
    if isinstance(ours, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(ours, theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return ours == theirs


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_precision_leaves_no_trace_of_a_skipped_update(
    name: str, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    """Two equal runs: one skips an update in between, with any gradients, the other has no such step."""
    images = torch.randn(3, 8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    no, yes = torch.tensor([False]), torch.tensor([True])
    ends = []
    for steps in ([(0, no), (1, no)], [(0, no), (2, yes), (1, no)], [(0, None), (1, None)]):
        model = small_model().eval()  # statistics are the loop's business
        precision = make_precision(model, name=name)
        optimizer = make_optimizer(list(precision.masters.values()))
        for index, skip_1 in steps:
            step(model, precision, optimizer, images[index], skip_1)
        state = [precision.model_state(), model.state_dict(), optimizer.state_dict()["state"], precision.state_dict()]
        ends.append(copy.deepcopy(dict(enumerate(state))))
    assert same(ends[1], ends[0])
    assert same(ends[2], ends[0])
    assert not same(ends[0][0], make_precision(small_model(), name=name).model_state())


@pytest.mark.parametrize("name", HALVES)
def test_underflow_is_counted_by_hand(name: str) -> None:
    """Two of the nine elements are below the smallest number with all its digits: one half of it, and a 0."""
    half = COMPUTE_DTYPES[name]
    smallest = {"fp16": 2.0**-14, "bf16": 2.0**-126}[name]
    grads = [torch.tensor([smallest, -smallest / 2, 1.0, 0.0], dtype=half), torch.full((5,), -smallest, dtype=half)]
    assert underflow_fraction(grads, sum_parts=lambda counts_2: counts_2) == 2 / 9
    more = torch.tensor([1.0, 3.0])
    assert underflow_fraction(grads, sum_parts=lambda counts_2: counts_2 + more) == 3 / 12


def test_precision_figures_of_a_step_by_hand() -> None:
    """Loss 2 * w * x with x = 3 and 2**-30: gradients 6 and 2**-29; fp16 holds the first, scaled both."""
    for name, expected in (("fp32", None), ("bf16", 0.0), ("fp16", 0.5)):
        model = nn.Linear(2, 1, bias=False)
        precision = Precision(model, name=name, device=CPU)
        inputs = torch.tensor([[3.0, 2.0**-30]])
        precision.backward((2 * model(inputs.to(precision.compute_dtype)).float()).sum())
        precision.update_(torch.optim.SGD(precision.masters.values(), lr=0.1))
        figures = precision.figures()
        assert (figures["underflow_fraction"], figures["grad_norm"]) == (expected, 6.0), name
        assert (figures["loss_scale"], figures["overflow_steps"]) == (1.0, 0), name


def test_loss_scale_lifts_gradients_out_of_the_underflow() -> None:
    """A gradient of 2**-26, which fp16 rounds to 0, and its update with and without a scale of 2**16."""
    for scaling, expected in ((None, 0.0), (Scaling(initial=65536.0, growth_steps=None), 2.0**-26)):
        model = nn.Linear(1, 1, bias=False)
        precision = Precision(model, name="fp16", device=CPU, scaling=scaling)
        before = precision.masters["weight"].detach().clone().zero_()
        with torch.no_grad():
            precision.masters["weight"].zero_()
        precision.write_half_()
        precision.backward(model(torch.ones(1, 1).half()).float().sum() * 2.0**-26)
        precision.update_(torch.optim.SGD(precision.masters.values(), lr=1.0, fused=True))
        assert float(before - precision.masters["weight"].detach()) == expected


@pytest.mark.parametrize("name", AUTOCAST_DTYPES)
def test_autocast_gives_the_numbers_of_torchs_own(name: str) -> None:
    """A model under torch.autocast, and its twin under ours: the same bits everywhere."""
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    theirs, ours = small_model(), small_model()
    with torch.autocast("cpu", dtype=AUTOCAST_DTYPES[name]):
        expected = theirs(images)
    nn.functional.cross_entropy(expected.float(), labels).backward()
    precision = Precision(ours, name=name, device=CPU)
    with precision.forward():
        logits = ours(images.to(precision.compute_dtype))
        assert (images @ images.mT).dtype == AUTOCAST_DTYPES[name]
    precision.backward(nn.functional.cross_entropy(logits.float(), labels))
    assert logits.dtype == AUTOCAST_DTYPES[name]
    assert torch.equal(logits, expected)
    for key, p in ours.named_parameters():
        twin = theirs.get_parameter(key)
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert twin.grad is not None
        assert torch.equal(p.grad, twin.grad), key
    assert same(dict(ours.state_dict()), dict(theirs.state_dict()))


@pytest.mark.parametrize("name", AUTOCAST_DTYPES)
def test_ghost_batch_norm_keeps_its_statistics_in_fp32_under_autocast(name: str) -> None:
    """Those of one ghost batch, in float64, of images that half precision holds exactly."""
    norm = GhostBatchNorm2d(3, bn_span=4, ghosts_per_step=1)
    images = (torch.arange(4 * 3 * 64).view(4, 3, 8, 8) % 97).float()
    with make_precision(norm, name=name).forward():
        out = norm(images.to(AUTOCAST_DTYPES[name]))
    assert out.dtype == AUTOCAST_DTYPES[name]
    var, mean = torch.var_mean(images.double(), (0, 2, 3))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, (0.1 * mean).float())
    torch.testing.assert_close(norm.running_var, (0.9 + 0.1 * var).float())


def test_tf32_is_allowed_and_forbidden_for_every_reader() -> None:
    """Sets it through torch's old and new interface, and neither may complain about the other."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for is_allowed in (True, False, True):
            set_tf32(is_allowed)
            assert torch.backends.cuda.matmul.allow_tf32 == is_allowed
            assert torch.backends.cudnn.allow_tf32 == is_allowed
            assert torch.get_float32_matmul_precision() == ("high" if is_allowed else "highest")
            assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == is_allowed
            assert (torch.backends.cudnn.conv.fp32_precision == "tf32") == is_allowed
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_precision_refuses_gradients_that_were_not_summed() -> None:
    """All weights are half here, so that the optimizer updates none that a reducer sums."""
    model = nn.Linear(3, 2)
    precision = Precision(model, name="bf16", device=torch.device("cpu"))
    reducer = GradientReducer(model.named_parameters(), alone())
    optimizer = torch.optim.SGD(precision.masters.values(), lr=0.1)
    precision.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    with pytest.raises(CommError, match=naming("Precision", "not summed", "wait()", "update_()")):
        precision.update_(optimizer)
    reducer.wait()
    precision.update_(optimizer)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_precision_refuses_weights_that_were_overwritten_without_their_masters(is_loaded: bool) -> None:
    """Such as by broadcast_parameters(), a reducer's weights="broadcast", or model.load_state_dict()."""
    model = small_model()
    precision = make_precision(model, name="bf16")
    optimizer = torch.optim.SGD(precision.masters.values(), lr=0.1)
    loaded = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    if is_loaded:
        precision.load_model_state(loaded)
        step(model, precision, optimizer, torch.ones(2, 3, 8, 8))
        return
    model.load_state_dict(loaded)
    with pytest.raises(ValueError, match=naming("overwritten", "before Precision", "load_model_state")):
        step(model, precision, optimizer, torch.ones(2, 3, 8, 8))


def test_precision_takes_weights_that_were_written_again_as_they_are() -> None:
    model = small_model()
    precision = make_precision(model, name="bf16")
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    step(model, precision, torch.optim.SGD(precision.masters.values(), lr=0.1), torch.ones(2, 3, 8, 8))


def test_precision_refuses_an_optimizer_of_half_weights() -> None:
    model = small_model()
    precision = make_precision(model, name="bf16")
    with pytest.raises(ValueError, match=naming("half-precision", "substitute=precision.masters")):
        step(model, precision, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3, 8, 8))


def test_precision_with_a_loss_scale_refuses_a_backward_of_torchs_own() -> None:
    model = small_model()
    precision = make_precision(model, name="fp16")
    optimizer = torch.optim.SGD(precision.masters.values(), lr=0.1)
    model(torch.ones(2, 3, 8, 8).half()).float().square().mean().backward()
    with pytest.raises(ValueError, match=naming("precision.backward(loss)")):
        precision.update_(optimizer)
    precision.scaled(model(torch.ones(2, 3, 8, 8).half()).float().square().mean()).backward()
    precision.update_(optimizer)


def test_precision_trains_after_the_optimizers_own_zero_grad() -> None:
    model = small_model()
    precision = make_precision(model, name="bf16")
    optimizer = torch.optim.SGD(precision.masters.values(), lr=0.1)
    for _ in range(2):
        before = precision.masters["0.weight"].detach().clone()
        step(model, precision, optimizer, torch.ones(2, 3, 8, 8))
        assert not torch.equal(precision.masters["0.weight"], before)
        optimizer.zero_grad()


@pytest.mark.parametrize("name", HALVES)
def test_precision_refuses_a_step_of_the_optimizer_alone(name: str) -> None:
    """It updates the masters by old gradients, and the model keeps its weights."""
    model = small_model()
    precision = make_precision(model, name=name)
    optimizer = torch.optim.SGD(precision.masters.values(), lr=0.1)
    images = torch.ones(2, 3, 8, 8)
    step(model, precision, optimizer, images)
    optimizer.step()
    with pytest.raises(ValueError, match=naming("masters", "precision.update_(optimizer)", "optimizer.step()")):
        step(model, precision, optimizer, images)
    precision.write_half_()
    step(model, precision, optimizer, images)


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("is_summed", [False, True])
def test_precision_drops_half_gradients_with_those_of_the_masters(to_none: bool, is_summed: bool) -> None:
    """An optimizer's zero_grad() zeroes all gradients, whatever their precision."""
    model = nn.Linear(1, 1, bias=False)
    precision = Precision(model, name="bf16", device=CPU)
    optimizer = torch.optim.SGD(precision.masters.values(), lr=0.0)
    reducer = GradientReducer(model.named_parameters(), alone()) if is_summed else None
    for _ in range(3):
        for is_last in (False, True):  # both count
            if reducer:
                reducer.is_active = is_last
            precision.backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        if reducer:
            reducer.wait()
        precision.update_(optimizer)
        assert precision.grad_norm() == 2.0
        optimizer.zero_grad(set_to_none=to_none)


@pytest.mark.parametrize("to_none", [True, False])
def test_precision_drops_half_gradients_each_time(to_none: bool) -> None:
    """Also if no update comes between two calls of zero_grad(), or the masters are written after one."""
    model = nn.Linear(1, 1, bias=False)
    precision = Precision(model, name="bf16", device=CPU)
    optimizer = torch.optim.SGD(precision.masters.values(), lr=0.0)
    for _ in range(2):
        for write in (lambda: None, precision.write_half_):
            optimizer.zero_grad(set_to_none=to_none)
            write()
            precision.backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
            assert model.weight.grad == 1
        precision.update_(optimizer)
        assert precision.grad_norm() == 1


@pytest.mark.parametrize(
    "options", [{"name": "fpp16"}, {"clip_norm": -1.0}, {"clip_norm": "1"}, {"scaling": 65536.0}], ids=str
)
def test_precision_refuses_arguments_that_it_cannot_use(options: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        Precision(small_model(), **{"name": "bf16", "device": CPU, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"initial": 0.0}, {"initial": 3.0}, {"growth_steps": 0}], ids=str)
def test_scaling_refuses_what_cannot_scale(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Scaling(**{"initial": 65536.0, "growth_steps": None, **options})  # type: ignore[arg-type]
