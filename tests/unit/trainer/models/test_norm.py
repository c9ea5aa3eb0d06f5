"""Ghost batch norm against a float64 oracle written from the formulas of batch norm, and flat statistics."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from error_texts import naming
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigbatch.trainer.models.norm import (
    GhostBatchNorm2d,
    JoinedSequential,
    flatten_running_statistics,
    ghost_momentum,
    norm_relu,
    normalize_views,
)
from bigbatch.trainer.models.resnet import ResidualBlock, bottleneck

C, H, W, SPAN, EPS, MOMENTUM = 3, 4, 5, 6, 1e-5, 0.1


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Expected:
    outputs: np.ndarray
    grad_inputs: np.ndarray
    grad_scale: np.ndarray
    grad_shift: np.ndarray
    ghost_means: np.ndarray
    ghost_vars: np.ndarray


def oracle(inputs: np.ndarray, grads: np.ndarray, *, scale: np.ndarray, shift: np.ndarray) -> Expected:
    """Batch norm of every SPAN samples, forward and backward; arrays are [samples, C, H, W] in float64."""
    pixels = (0, 2, 3)
    count = SPAN * inputs.shape[2] * inputs.shape[3]
    outputs, grad_inputs, means, unbiased, grad_scale, grad_shift = [], [], [], [], 0.0, 0.0
    for first in range(0, len(inputs), SPAN):
        x, dy = inputs[first : first + SPAN], grads[first : first + SPAN]
        mean = x.sum(pixels) / count
        squares = ((x - mean[:, None, None]) ** 2).sum(pixels)
        inverse = 1 / np.sqrt(squares / count + EPS)
        unit = (x - mean[:, None, None]) * inverse[:, None, None]
        dy_sum, dy_unit_sum = dy.sum(pixels), (dy * unit).sum(pixels)
        pull = dy_sum[:, None, None] / count + unit * dy_unit_sum[:, None, None] / count
        outputs.append(unit * scale[:, None, None] + shift[:, None, None])
        grad_inputs.append((dy - pull) * (scale * inverse)[:, None, None])
        means.append(mean)
        unbiased.append(squares / (count - 1))
        grad_scale, grad_shift = grad_scale + dy_unit_sum, grad_shift + dy_sum
    return Expected(
        np.concatenate(outputs),
        np.concatenate(grad_inputs),
        np.asarray(grad_scale),
        np.asarray(grad_shift),
        np.stack(means),
        np.stack(unbiased),
    )


def make_norm(ghosts_per_step: int, *, momentum: float = MOMENTUM) -> GhostBatchNorm2d:
    """A float64 layer without default parameters or statistics."""
    norm = GhostBatchNorm2d(C, bn_span=SPAN, ghosts_per_step=ghosts_per_step, eps=EPS, momentum=momentum)
    for value, start in ((norm.weight, 0.5), (norm.bias, -1.0), (norm.running_mean, 2.0), (norm.running_var, 3.0)):
        value.data = torch.arange(C, dtype=torch.float64) + start
    return norm


def make_inputs(num_ghosts: int, *, seed: int = 0) -> Tensor:
    """Samples with another mean and spread in each ghost batch, so that a wrong weight shows."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_ghosts, SPAN, C, H, W, generator=generator, dtype=torch.float64)
    drift = torch.arange(1.0, num_ghosts + 1, dtype=torch.float64).view(-1, 1, 1, 1, 1)
    return (noise * drift + drift).flatten(0, 1)


def train_step(norm: GhostBatchNorm2d, microbatches: list[Tensor]) -> None:
    for microbatch in microbatches:
        norm(microbatch)


def assert_statistics(mean: Tensor, var: Tensor, expected: Expected, *, num_steps: int = 1) -> None:
    """(1-m) r + m * mean over ghosts, num_steps times with the same ghosts, from make_norm's start."""
    kept = (1 - MOMENTUM) ** num_steps
    start = np.arange(C)
    want_mean = kept * (start + 2.0) + (1 - kept) * expected.ghost_means.mean(0)
    want_var = kept * (start + 3.0) + (1 - kept) * expected.ghost_vars.mean(0)
    np.testing.assert_allclose(mean.numpy(), want_mean, rtol=1e-12)
    np.testing.assert_allclose(var.numpy(), want_var, rtol=1e-12)


def oracle_of(inputs: Tensor, grads: Tensor | None = None, *, norm: nn.BatchNorm2d) -> Expected:
    grads = torch.zeros_like(inputs) if grads is None else grads
    as_array = [t.detach().double().numpy() for t in (inputs, grads, norm.weight, norm.bias)]
    return oracle(as_array[0], as_array[1], scale=as_array[2], shift=as_array[3])


@pytest.mark.parametrize("ghosts_per_step", [1, 2, 4, 7])
@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0])
def test_ghost_momenta_weigh_all_ghosts_alike(ghosts_per_step: int, momentum: float) -> None:
    b = [ghost_momentum(k, momentum=momentum, ghosts_per_step=ghosts_per_step) for k in range(ghosts_per_step)]
    weights = [b[k] * np.prod([1 - later for later in b[k + 1 :]]) for k in range(ghosts_per_step)]
    np.testing.assert_allclose(weights, momentum / ghosts_per_step, rtol=1e-12)


@pytest.mark.parametrize("num_ghosts", [1, 2, 4])
def test_norm_outputs_gradients_and_statistics_match_the_formulas(num_ghosts: int) -> None:
    norm = make_norm(num_ghosts)
    inputs = make_inputs(num_ghosts).requires_grad_()
    grads = make_inputs(num_ghosts, seed=1)
    outputs = norm(inputs)
    outputs.backward(grads)
    expected = oracle_of(inputs, grads, norm=norm)
    for got, want in (
        (outputs, expected.outputs),
        (inputs.grad, expected.grad_inputs),
        (norm.weight.grad, expected.grad_scale),
        (norm.bias.grad, expected.grad_shift),
    ):
        np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-10, atol=1e-10)
    assert_statistics(norm.running_mean, norm.running_var, expected)


LAYOUTS = {
    "contiguous": lambda inputs: inputs,
    "channels last": lambda inputs: inputs.contiguous(memory_format=torch.channels_last),
    "transposed": lambda inputs: inputs.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda inputs: inputs.repeat_interleave(2, 3)[..., ::2],
}
"""Gives the same samples in another layout."""


def assert_view_matches_the_formulas(norm: GhostBatchNorm2d, layer: Any, *, has_relu: bool, layout: str) -> None:
    """layer: computes norm of samples, with ReLU if has_relu; the ghost batches of a step."""
    count = norm.ghosts_per_step
    inputs, grads = LAYOUTS[layout](make_inputs(count)).requires_grad_(), make_inputs(count, seed=1)
    outputs = layer(inputs)
    found = torch.autograd.grad(outputs, [inputs, norm.weight, norm.bias], grads)
    expected = oracle_of(inputs, grads, norm=norm)
    want = expected.outputs
    if has_relu:
        expected = oracle_of(inputs, grads * torch.from_numpy(want > 0), norm=norm)
        want = np.maximum(want, 0)
        assert 0.2 < (want == 0).mean() < 0.8
    for got, truth in zip(
        (outputs, *found), (want, expected.grad_inputs, expected.grad_scale, expected.grad_shift), strict=True
    ):
        np.testing.assert_allclose(got.detach().numpy(), truth, rtol=1e-10, atol=1e-10)
    assert outputs.stride() == torch.empty_like(inputs).stride()
    assert_statistics(norm.running_mean, norm.running_var, expected)


@pytest.fixture
def _as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normalize the view that compiled code for a GPU normalizes."""
    monkeypatch.setattr("bigbatch.trainer.models.norm.is_compiling", lambda: True)
    monkeypatch.setattr(GhostBatchNorm2d, "joins_relu", lambda *_: True)


@pytest.mark.usefixtures("_as_for_a_gpu")
@pytest.mark.parametrize("has_relu", [False, True])
@pytest.mark.parametrize(("layout", "num_ghosts"), [*((layout, 3) for layout in LAYOUTS), ("channels last", 1)])
def test_ghosts_as_a_view_match_the_formulas(has_relu: bool, layout: str, num_ghosts: int) -> None:
    norm = make_norm(num_ghosts)
    layer = partial(norm_relu, norm, nn.ReLU()) if has_relu else norm
    assert_view_matches_the_formulas(norm, layer, has_relu=has_relu, layout=layout)


@pytest.mark.usefixtures("_as_for_a_gpu")
@pytest.mark.parametrize(
    "has_relu", [pytest.param(False, marks=pytest.mark.weekly), pytest.param(True, marks=pytest.mark.long)]
)
def test_compiled_ghosts_as_a_view_match_the_formulas(has_relu: bool) -> None:
    norm = make_norm(3)
    layer = torch.compile(partial(norm_relu, norm, nn.ReLU()) if has_relu else norm, fullgraph=True, dynamic=False)
    assert_view_matches_the_formulas(norm, layer, has_relu=has_relu, layout="channels last")


def sum_of_two(norms: list[GhostBatchNorm2d], inputs: list[Tensor]) -> Tensor:
    return normalize_views(*zip(norms, inputs, strict=True), has_relu=True)


@pytest.mark.usefixtures("_as_for_a_gpu")
@pytest.mark.parametrize(
    ("num_ghosts", "is_compiled"),
    [(1, False), (3, False), pytest.param(3, True, marks=pytest.mark.long)],
)
def test_sum_of_two_views_with_relu_matches_the_formulas(num_ghosts: int, is_compiled: bool) -> None:
    """As at the end of a residual block with a projection; the mask is that of the sum."""
    norms, grads = [make_norm(num_ghosts), make_norm(num_ghosts)], make_inputs(num_ghosts, seed=2)
    with torch.no_grad():
        norms[1].weight.mul_(-0.5)
        norms[1].bias.add_(0.5)
    inputs = [LAYOUTS["channels last"](make_inputs(num_ghosts, seed=seed)).requires_grad_() for seed in (0, 1)]
    layer = torch.compile(sum_of_two, fullgraph=True, dynamic=False) if is_compiled else sum_of_two
    outputs = layer(norms, inputs)
    sums = sum(oracle_of(each, norm=norm).outputs for norm, each in zip(norms, inputs, strict=True))
    assert 0.2 < (sums < 0).mean() < 0.8
    np.testing.assert_allclose(outputs.detach().numpy(), np.maximum(sums, 0), rtol=1e-10, atol=1e-10)
    assert outputs.stride() == inputs[0].stride()
    outputs.backward(grads)
    biases = [norm.bias.grad.data_ptr() for norm in norms]
    assert biases[0] != biases[1], "what changes one gradient in place would change the other"
    for norm, each in zip(norms, inputs, strict=True):
        expected = oracle_of(each, grads * torch.from_numpy(sums > 0), norm=norm)
        for got, want in (
            (each.grad, expected.grad_inputs),
            (norm.weight.grad, expected.grad_scale),
            (norm.bias.grad, expected.grad_shift),
        ):
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-10, atol=1e-10)
        assert_statistics(norm.running_mean, norm.running_var, expected)


@pytest.mark.parametrize("last", [nn.ReLU, nn.CELU])
def test_sequence_joins_a_norm_with_a_relu_behind_it_alone(last: type[nn.Module], monkeypatch: Any) -> None:
    layers = JoinedSequential(make_norm(2), last(), nn.MaxPool2d(2), nn.Identity(), nn.ReLU())
    inputs = make_inputs(2)
    want = nn.Sequential.forward(copy.deepcopy(layers), inputs)
    assert torch.equal(copy.deepcopy(layers)(inputs), want), "eager, the bits stay"
    monkeypatch.setattr("bigbatch.trainer.models.norm.is_compiling", lambda: True)
    monkeypatch.setattr(GhostBatchNorm2d, "joins_relu", lambda *_: True)
    calls: list[type[nn.Module]] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: calls.append(type(module)))
    torch.testing.assert_close(layers(inputs), want)
    before = [] if last is nn.ReLU else [GhostBatchNorm2d, last]
    assert calls == [*before, nn.MaxPool2d, nn.Identity, nn.ReLU]


@pytest.mark.usefixtures("_as_for_a_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_view_of_half_precision_rounds_once(dtype: torch.dtype) -> None:
    norm, inputs = make_norm(2).float(), make_inputs(2).to(dtype).requires_grad_()
    grads = make_inputs(2, seed=1).to(dtype)
    outputs = norm(inputs)
    outputs.backward(grads)
    expected, rounding = oracle_of(inputs, grads, norm=norm), torch.finfo(dtype).eps
    assert outputs.dtype == inputs.grad.dtype == dtype
    assert norm.running_mean.dtype == norm.weight.grad.dtype == torch.float32
    for got, want in ((outputs, expected.outputs), (inputs.grad, expected.grad_inputs)):
        np.testing.assert_allclose(got.detach().double().numpy(), want, rtol=rounding, atol=0.01 * rounding)


@pytest.mark.usefixtures("_as_for_a_gpu")
def test_view_passes_what_is_not_a_number_to_weights_and_images() -> None:
    """A step with an overflow is skipped by its gradients, so ReLU's mask must not hide it."""
    norm, inputs = make_norm(2), make_inputs(2)
    inputs[0, 0, 0, 0] = torch.nan
    outputs = norm_relu(norm, nn.ReLU(), inputs.requires_grad_())
    outputs.sum().backward()
    assert outputs[:SPAN, 0].isnan().all()
    assert inputs.grad[:SPAN, 0].isnan().all()
    assert not inputs.grad[SPAN:].isnan().any()
    assert norm.weight.grad.isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("num_ghosts", [1, 3])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(("channels", "num_norms"), [(8, 3), (4, 4)])
def test_compiled_block_for_a_gpu_has_views_in_training_only(
    num_ghosts: int, is_training: bool, channels: int, num_norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_: torch.channels_last)
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph.print_readable(print_output=False))
        return graph

    norm = partial(GhostBatchNorm2d, bn_span=SPAN, ghosts_per_step=num_ghosts)
    with FakeTensorMode(), torch.device("cuda"):  # tensors that have a device and no values
        block = ResidualBlock(channels, bottleneck(2, 1), norm=norm, blurpool=False).train(is_training)
        images_BCHW = torch.empty(num_ghosts * SPAN, channels, 4, 4)
        with torch.no_grad():
            assert torch.compile(block, fullgraph=True, dynamic=False, backend=keep)(images_BCHW).shape == (
                num_ghosts * SPAN,
                8,
                4,
                4,
            )
    counts = [code.count("var_mean(") for code in graphs], [code.count("batch_norm(") for code in graphs]
    assert counts == (([num_norms], [0]) if is_training else ([0], [num_norms]))


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write, but for views; a tensor counts once in an operation."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if not func.is_view and "empty" not in func._schema.name:
            touched = [t for t in tree_leaves((args, kwargs, results)) if isinstance(t, Tensor)]
            self.num_bytes += sum({t.data_ptr(): t.nbytes for t in touched}.values())
        return results


def test_norm_of_ghosts_moves_no_more_bytes_than_plain_batch_norm_but_for_one_copy_in_backward() -> None:
    images_BCHW = torch.randn(4 * SPAN, C, 32, 32).contiguous(memory_format=torch.channels_last)
    ghosts, alone = (GhostBatchNorm2d(C, bn_span=4 * SPAN // count, ghosts_per_step=count) for count in (4, 1))
    moved = []
    for norm in (nn.BatchNorm2d(C), ghosts, alone):
        inputs_BCHW = images_BCHW.clone(memory_format=torch.preserve_format).requires_grad_()
        grad_BCHW = images_BCHW.clone(memory_format=torch.preserve_format)
        with Traffic() as forward:
            outputs_BCHW = norm(inputs_BCHW)
        with Traffic() as backward:
            torch.autograd.grad(outputs_BCHW, [inputs_BCHW, norm.weight, norm.bias], grad_BCHW)
        moved.append((forward.num_bytes / images_BCHW.nbytes, backward.num_bytes / images_BCHW.nbytes))
    # vectors of C elements are 0.001 of the images
    assert moved[0] == pytest.approx((2, 3), abs=0.05)
    assert moved[1] == pytest.approx((2, 5), abs=0.05)
    assert moved[2] == pytest.approx((2, 3), abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_norm_of_a_ghost_has_the_same_bits_beside_others_as_alone(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    inputs, grads = (make_inputs(3, seed=s).to(dtype).contiguous(memory_format=memory_format) for s in (0, 1))
    found = []
    for each in (SPAN, 3 * SPAN):
        norm, results = make_norm(3).float(), []
        for part, grad in zip(inputs.split(each), grads.split(each), strict=True):
            part = part.clone(memory_format=torch.preserve_format).requires_grad_()
            outputs = norm(part)
            outputs.backward(grad)
            assert outputs.is_contiguous(memory_format=memory_format)
            results += [outputs.detach(), part.grad]
        found.append([torch.cat(results[::2]), torch.cat(results[1::2]), norm.running_mean, norm.running_var])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("ghosts_per_forward", [1, 2, 4])
def test_norm_statistics_do_not_depend_on_the_microbatches(
    ghosts_per_forward: int, is_view: bool, request: pytest.FixtureRequest
) -> None:
    if is_view:
        request.getfixturevalue("_as_for_a_gpu")
    norm, inputs = make_norm(4), make_inputs(4)
    for _ in range(3):
        train_step(norm, list(inputs.split(ghosts_per_forward * SPAN)))
    assert_statistics(norm.running_mean, norm.running_var, oracle_of(inputs, norm=norm), num_steps=3)


def test_ghost_that_is_one_is_plain_batch_norm_in_train_and_eval() -> None:
    norm, inputs = make_norm(1), make_inputs(1)
    plain = nn.BatchNorm2d(C, eps=EPS, momentum=MOMENTUM).double()
    plain.load_state_dict(norm.state_dict(), strict=True)
    torch.testing.assert_close(norm(inputs), plain(inputs), rtol=0, atol=0)
    norm.eval()
    plain.eval()
    torch.testing.assert_close(norm(inputs[: SPAN - 1]), plain(inputs[: SPAN - 1]), rtol=0, atol=0)
    torch.testing.assert_close(norm.running_var, plain.running_var, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_half_inputs_keep_fp32_statistics_and_channels_last(dtype: torch.dtype) -> None:
    norm = make_norm(2).float()
    inputs = make_inputs(2).to(dtype, memory_format=torch.channels_last).requires_grad_()
    # Same layout as the outputs, as in a whole model: torch is less exact on a CPU where the two differ.
    grads = make_inputs(2, seed=1).to(dtype, memory_format=torch.channels_last)
    outputs = norm(inputs)
    outputs.backward(grads)
    expected = oracle_of(inputs, grads, norm=norm)
    rounding = torch.finfo(dtype).eps
    assert outputs.dtype == inputs.grad.dtype == dtype
    assert outputs.is_contiguous(memory_format=torch.channels_last)
    assert norm.running_mean.dtype == norm.weight.grad.dtype == torch.float32
    for got, want in ((outputs, expected.outputs), (inputs.grad, expected.grad_inputs)):
        np.testing.assert_allclose(got.detach().double().numpy(), want, rtol=rounding, atol=0.01 * rounding)
    for got, want in ((norm.weight.grad, expected.grad_scale), (norm.bias.grad, expected.grad_shift)):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-3)
    want_mean = 0.9 * (np.arange(C) + 2.0) + 0.1 * expected.ghost_means.mean(0)
    np.testing.assert_allclose(norm.running_mean.numpy(), want_mean, rtol=1e-5)


def test_norm_batch_that_is_no_multiple_of_the_span_is_refused() -> None:
    norm = make_norm(4)
    with pytest.raises(ValueError, match=naming("7 samples", "bn_span 6")):
        norm(make_inputs(2)[:7])
    with pytest.raises(ValueError, match=naming("0 samples", "bn_span 6")):
        norm(make_inputs(1)[:0])
    assert norm.ghost_index == 0


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("layer", [lambda norm, x: norm(x), lambda norm, x: normalize_views((norm, x), has_relu=True)])
def test_ghost_of_one_value_per_channel_is_refused_as_by_torch(count: int, layer: Any) -> None:
    """It has no variance. Two images of one pixel in a ghost batch, or one image of two, have one."""
    norm = GhostBatchNorm2d(C, bn_span=1, ghosts_per_step=4)
    images = torch.ones(count, C, 1, 1)
    with pytest.raises(
        ValueError, match=naming("Expected more than 1 value per channel when training", "batch.bn_span")
    ):
        layer(norm, images)
    assert norm.ghost_index == 0
    layer(norm, torch.ones(count, C, 1, 2))
    layer(GhostBatchNorm2d(C, bn_span=2, ghosts_per_step=4), torch.ones(2 * count, C, 1, 1))
    assert norm.running_var.isfinite().all()
    assert norm.eval()(images).isfinite().all()


def test_norm_batch_that_runs_over_the_step_is_refused() -> None:
    norm = make_norm(3)
    norm(make_inputs(2))
    with pytest.raises(ValueError, match=naming("2 ghost batches", "after 2 ", "ghosts_per_step 3")):
        norm(make_inputs(2))


def two_norms() -> nn.Sequential:
    """Two layers, so that one layer's update would show in the other's version counter."""
    norm = [GhostBatchNorm2d(C, bn_span=SPAN, ghosts_per_step=2) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(C, C, 1), norm[0], nn.Conv2d(C, C, 1), norm[1], nn.BatchNorm2d(C))


def test_flat_statistics_are_the_buffers() -> None:
    model = two_norms()
    model(make_inputs(2).float())
    before = copy.deepcopy(model.state_dict())
    statistics_N = flatten_running_statistics(model)
    assert statistics_N.shape == (3 * 2 * C,)
    assert statistics_N.dtype == torch.float32
    assert list(model.state_dict()) == list(before)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    statistics_N.copy_(torch.arange(18.0))
    assert model[1].running_mean.tolist() == [0, 1, 2]
    assert model[4].running_var.tolist() == [15, 16, 17]


def test_norm_averaging_between_forward_and_backward_leaves_autograd_alone() -> None:
    model = two_norms()
    twin = copy.deepcopy(model)
    statistics_N = flatten_running_statistics(model)
    inputs = make_inputs(2).float()
    outputs = model(inputs)
    statistics_N.mul_(0.5)
    outputs.square().sum().backward()
    twin(inputs).square().sum().backward()
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=0)


def test_norm_model_without_running_statistics_gives_an_empty_tensor() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm2d(C, track_running_stats=False))
    assert flatten_running_statistics(model).shape == (0,)
