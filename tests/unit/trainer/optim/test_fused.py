"""What our fused optimizers promise alike: state, groups, GradScaler, memory formats, no waits, what they refuse."""

import copy
import math
import re
import warnings
from functools import partial

import pytest
import torch
from error_texts import naming
from optimizer_steps import (
    DEVICES,
    Launches,
    assert_memory_format_changes_nothing,
    assert_same_bits,
    assert_state_dict_resumes,
    clones,
    random_weights,
    scaled_step,
    set_random_grads,
)
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from bigbatch.trainer.optim import lamb, lars
from bigbatch.trainer.optim.fused import scaled_on_gpu
from bigbatch.trainer.optim.lamb import LAMB
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.lion import Lion
from bigbatch.trainer.optim.matrices import Part
from bigbatch.trainer.optim.muon import Muon
from bigbatch.trainer.optim.param_groups import param_groups
from bigbatch.trainer.optim.shampoo import Shampoo

timm = pytest.importorskip("timm.optim")

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:.*against the published rule:UserWarning")


def of_matrices(kind, params, **settings):
    """Put whatever is not a matrix into a group that is none."""
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    parts = [
        {**group, "params": [p for p in group["params"] if (p.dim() > 1) is is_matrix], "adapt": is_matrix}
        for group in groups
        for is_matrix in (True, False)
    ]
    return kind([part for part in parts if part["params"]], **{"lr": 0.1} | settings)


muon = partial(of_matrices, Muon)
shampoo = partial(of_matrices, Shampoo, root_every_steps=2)


KINDS = pytest.mark.parametrize("kind", [LARS, LAMB, Lion, Muon, Shampoo])
MAKERS = {
    "lars inside": partial(LARS, lr=3.0, momentum_form="lr_inside"),
    "lars outside": partial(LARS, lr=3.0, momentum_form="lr_outside", nesterov=True),
    "lamb": partial(LAMB, lr=0.1, betas=(0.8, 0.9)),
    "lion": partial(Lion, lr=0.1, betas=(0.8, 0.9)),
    "muon": muon,
    "shampoo": shampoo,
}
FUSED = pytest.mark.parametrize("name", MAKERS)
WAYS = [*MAKERS, "lars inside, as on a GPU", "lars outside, as on a GPU", "lamb, as on a GPU"]
"""LARS and LAMB have another way to the same update on a GPU."""


@pytest.fixture(params=WAYS)
def make(request, monkeypatch):
    name, _, on_gpu = request.param.partition(", ")
    if on_gpu:
        monkeypatch.setattr(LARS, "_update_on_cpu_", LARS._update_at_once_)
        for module in (lars, lamb):
            monkeypatch.setattr(module, "scaled", scaled_on_gpu)
    return MAKERS[name]


def states(optimizer):
    return clones(value for state in optimizer.state.values() for value in state.values())


def is_untouched(optimizer):
    """Roots begin as identities, all else with zeros."""
    kept = [value for state in optimizer.state.values() for key, value in state.items() if key != "roots"]
    return not any(value.any() for value in kept)


def test_fused_state_dict_resumes_bit_for_bit(make):
    assert_state_dict_resumes(
        partial(make, weight_decay=0.01), resumed_as=partial(make, lr=1.0, weight_decay=0.0), states=states
    )


def stepped(make, weights):
    set_random_grads(weights, seed=0)
    optimizer = make(weights)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        ("lion", partial(torch.optim.Adam, lr=0.1), "exp_avg_sq"),
        ("lion", "lamb", "exp_avg_sq"),
        ("lars inside", partial(torch.optim.SGD, lr=0.1, momentum=0.9), "trust_coefficient"),
        ("muon", "shampoo", "factors"),
        ("shampoo", "muon", "factors"),
        ("muon", partial(of_matrices, LARS), "lr_inside"),
        ("shampoo", partial(shampoo, block_size=2), "factors of weight 0"),
    ],
)
def test_fused_refuses_the_state_of_another_optimizer_before_any_change(ours, theirs, named):
    """Lion would take Adam's mean for its own, and Muon and Shampoo have settings of the same names."""
    mine = stepped(MAKERS[ours], random_weights())
    before, groups = states(mine), copy.deepcopy(mine.state_dict()["param_groups"])
    saved = stepped(MAKERS.get(theirs, theirs), random_weights()).state_dict()
    with pytest.raises(ValueError, match=naming(f"not of {type(mine).__name__} ", named)):
        mine.load_state_dict(saved)
    assert_same_bits(states(mine), before)
    assert mine.state_dict()["param_groups"] == groups


@FUSED
def test_fused_refuses_the_state_of_other_weights(name):
    """A kernel would read beyond a shorter momentum: it walks raw memory."""
    saved = stepped(MAKERS[name], random_weights()).state_dict()
    first = next(key for key in ("momentum_buffer", "exp_avg") if key in saved["state"][0])
    saved["state"][0][first] = saved["state"][0][first][:2]
    with pytest.raises(ValueError, match=naming(f"{first} of weight 0", "(2, 3, 3, 3), not (4, 3, 3, 3)")):
        MAKERS[name](random_weights()).load_state_dict(saved)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (partial(LAMB, betas=(0.9, 0.98)), partial(timm.Lamb, betas=(0.9, 0.98), eps=1e-6, max_grad_norm=None)),
        (partial(LAMB, adapt=False), partial(torch.optim.AdamW, eps=1e-6)),
        (partial(Lion, betas=(0.9, 0.98)), partial(timm.Lion, betas=(0.9, 0.98))),
        (partial(LARS, adapt=False, nesterov=True), partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
        (partial(LARS, adapt=False, momentum=0.0), torch.optim.SGD),
        (partial(LARS, adapt=False, momentum_form="lr_outside"), partial(torch.optim.SGD, momentum=0.9)),
        (partial(Muon, adapt=False, momentum=0.9), partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
    ],
)
def test_fused_is_its_peer(ours, theirs):
    """timm's LAMB does not adapt a group without decay; ours has adapt for that."""
    ends, has_own_rate = [], "momentum_form" not in ours.keywords and ours.func is LARS
    for make in (ours, theirs):
        weights = random_weights(dtype=torch.float64)
        groups = [
            {"params": weights[:2], "weight_decay": 0.1},
            {"params": weights[2:], "weight_decay": 0.0, "adapt": False},
        ]
        optimizer = make(groups, lr=0.01)
        for seed in range(30):
            if not has_own_rate:  # the momentum of the other form remembers it
                for group in optimizer.param_groups:
                    group["lr"] = 0.001 * (seed + 1)
            set_random_grads(weights, seed=seed)
            optimizer.step()
        ends.append(weights)
    torch.testing.assert_close(*ends, rtol=1e-11, atol=1e-12)


@FUSED
def test_fused_copy_goes_on_alike_and_shares_what_joins_ranks(name):
    weights = random_weights()
    optimizer = MAKERS[name](weights)
    own = next((key for key in ("divide", "norms") if hasattr(optimizer, key)), None)
    joined = Joined(getattr(optimizer, own)) if own else None
    if own:
        setattr(optimizer, own, joined.call)
    set_random_grads(weights, seed=0)
    optimizer.step()
    copied = copy.deepcopy({"weights": weights, "optimizer": optimizer})
    assert own is None or getattr(copied["optimizer"], own) == joined.call
    for tensors, each in (weights, optimizer), (copied["weights"], copied["optimizer"]):
        set_random_grads(tensors, seed=1)
        each.step()
    assert_same_bits(copied["weights"], weights)
    assert_same_bits(states(copied["optimizer"]), states(optimizer))


class Joined:
    """Stands for a communicator, which cannot be copied."""

    def __init__(self, function):
        self.function = function

    def call(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def test_fused_group_that_is_added_equals_one_from_the_start(make):
    early, late = random_weights(), random_weights()
    from_start = make([{"params": early[:2]}, {"params": early[2:], "adapt": False}])
    added = make(late[:2])
    added.add_param_group({"params": late[2:], "adapt": False})
    for weights, optimizer in ((early, from_start), (late, added)):
        set_random_grads(weights, seed=0)
        optimizer.step()
    assert_same_bits(late, early)


def in_groups(weights, **matrices):
    """Groups of matrices and of the rest, with settings of the matrices."""
    return [
        {"params": [w for w in weights if w.dim() > 1], **matrices},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0, **dict.fromkeys(matrices, False)},
    ]


def vit():
    """A model with all that timm's groups sort: matrices, biases, norms, a token, and a convolution."""
    torch.manual_seed(0)
    return nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)})


@pytest.mark.parametrize("name", ["lars inside", "lars outside", "lamb"])
@pytest.mark.parametrize(
    "groups",
    [
        in_groups,
        list,  # mixed in one group
        lambda weights: [(f"layer.{index}", weight) for index, weight in enumerate(weights)],
        lambda weights: [{"params": weights, "adapt": None}],
    ],
)
def test_fused_adapts_no_bias_and_norm_unless_asked(name, groups):
    """MLPerf's rule: as if the groups said so, bit for bit, also after a state_dict."""
    ends = []
    for make in (groups, partial(in_groups, adapt=True)):
        weights = random_weights()
        optimizer = MAKERS[name](make(weights))
        for seed in range(4):
            if seed == 2:
                before, optimizer = optimizer, MAKERS[name](make(weights))
                optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
            set_random_grads(weights, seed=seed)
            optimizer.step()
        ends.append(weights)
    assert_same_bits(*ends)


@pytest.mark.parametrize("name", ["lars inside", "lamb"])
def test_fused_takes_the_groups_of_timm_as_ours(name):
    ends = []
    for groups in (timm.param_groups_weight_decay, param_groups):
        model = vit()
        optimizer = MAKERS[name](groups(model, weight_decay=0.01))
        for seed in range(3):
            set_random_grads([*model.parameters()], seed=seed)
            optimizer.step()
        ends.append([*model.parameters()])
    assert_same_bits(*ends)


@pytest.mark.parametrize("name", ["lars inside", "lamb"])
def test_fused_adapts_a_part_of_a_matrix(name):
    """A rank's part is flat; the whole has two dimensions."""
    part, vector = Part(torch.ones(4)), Part(torch.ones(4))
    part.whole_shape, vector.whole_shape = torch.Size((4, 4)), torch.Size((16,))
    for weight in (part, vector):
        weight.grad = torch.full_like(weight, 2.0)
    MAKERS[name]([part, vector]).step()
    assert not torch.equal(part, vector)
    alone = torch.ones(4, requires_grad=True)
    alone.grad = torch.full_like(alone, 2.0)
    MAKERS[name]([alone], adapt=True).step()
    torch.testing.assert_close(part.detach(), alone.detach())


@pytest.mark.parametrize("name", ["lars inside", "lamb"])
def test_fused_warns_if_bias_and_norm_decay_unasked(name):
    model = vit()
    fine = [param_groups(model, weight_decay=0.5), param_groups(model, weight_decay=0.5, exclude_bias_and_norm=False)]
    fine += [timm.param_groups_weight_decay(model, 0.5), [{"params": [*model.parameters()], "adapt": True}]]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for groups in fine:
            MAKERS[name](groups, weight_decay=0.5)
        MAKERS[name](model.parameters())
        assert not seen
        kind = type(MAKERS[name](model.named_parameters(), weight_decay=0.5)).__name__
    fix = f"bigbatch.param_groups(model, weight_decay=0.5) to {kind}"
    (text,) = [str(each.message) for each in seen]
    assert re.search(naming(f"{kind}: 4 of 6 parameters", "bias and norm", "weight_decay=0.5", fix), text)


@pytest.mark.parametrize("lr", [torch.tensor(0.25), torch.tensor([0.25]), torch.tensor(0.25, dtype=torch.float64)])
def test_fused_rate_in_a_tensor_is_that_number(make, lr):
    ends = []
    for rate in (0.25, lr):
        weights = random_weights()
        optimizer = make(weights, lr=rate)
        for seed in range(3):
            set_random_grads(weights, seed=seed)
            optimizer.step()
        ends.append(weights)
    assert_same_bits(*ends)


@pytest.mark.long
@pytest.mark.parametrize("name", ["lars inside", "shampoo"])
def test_fused_step_under_the_compiler_is_the_step(name):
    """aot_eager traces as inductor does, and generates no code; the step is that of the base class."""
    ends = []
    for compiled in (False, True):
        weights = random_weights()
        optimizer = MAKERS[name](weights)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        set_random_grads(weights, seed=0)
        step()
        ends.append(weights)
    assert_same_bits(*ends)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{type(optimizer).__name__} is fused .*the model alone"):
        torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)()


def test_fused_parameters_without_gradient_stay_and_count_no_step(make):
    weights = random_weights()
    before = clones(weights)
    set_random_grads(weights[:2], seed=0)
    optimizer = make(weights, weight_decay=0.1)
    optimizer.step()
    assert_same_bits(clones(weights[2:]), before[2:])
    assert not torch.equal(weights[0], before[0])
    assert len(optimizer.state) == 2


def test_fused_closure_runs_with_gradients_on_and_its_loss_returns():
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    optimizer = LARS([weight], lr=1.0, trust_coefficient=0.1, adapt=True)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum() / 2
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 12.5
    torch.testing.assert_close(weight.detach(), torch.tensor([2.7, 3.6]))  # |w| = |g|: r = 0.1


def test_fused_memory_format_changes_nothing(make):
    assert_memory_format_changes_nothing(partial(make, weight_decay=1e-4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("first", "poison", "unscale_first"), [(0, math.inf, True), (3, math.nan, False), (3, math.inf, True)]
)
def test_fused_overflow_leaves_every_bit_and_the_run_goes_on(make, first, poison, unscale_first, device):
    def start():
        weights = random_weights(device=device)
        groups = [{"params": weights[:3]}, {"params": weights[3:], "adapt": False}]
        return weights, make(groups, weight_decay=0.1)

    weights, optimizer = start()
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1000)
    for seed in range(first):
        scaled_step(scaler, optimizer, weights, seed=seed, unscale_first=unscale_first)
    before = clones(weights), states(optimizer)
    scaled_step(scaler, optimizer, weights, seed=99, poison=poison, unscale_first=unscale_first)
    assert_same_bits(clones(weights), before[0])
    if first:
        assert_same_bits(states(optimizer), before[1])
    assert is_untouched(optimizer) == (first == 0)
    assert scaler.get_scale() == 2.0**9
    for seed in range(first, first + 3):
        scaled_step(scaler, optimizer, weights, seed=seed, unscale_first=unscale_first)

    plain_weights, plain = start()
    for seed in range(first + 3):
        set_random_grads(plain_weights, seed=seed)
        plain.step()
    assert_same_bits(clones(weights), clones(plain_weights))  # powers of two scale without rounding
    assert_same_bits(states(optimizer), states(plain))


def test_fused_overflow_counted_on_two_devices_skips(make):
    weights = random_weights()
    before = clones(weights)
    set_random_grads(weights, seed=0)
    optimizer = make(weights)
    optimizer.found_inf = torch.tensor(2.0)
    optimizer.step()
    assert_same_bits(clones(weights), before)
    assert is_untouched(optimizer)


def launches(num_tensors, *, name, is_scaled, prepare=lambda optimizer: None):
    """List what a step on that many tensors launches, by tensors that have a device and no values."""
    shapes = ((4, 3, 3, 3), (5, 7), (6,), (1,), ())
    with FakeTensorMode():
        weights = [torch.empty(shapes[i % 5], device="cuda") for i in range(num_tensors)]
        weights = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in weights]
        for weight in weights:
            weight.requires_grad_().grad = torch.empty_like(weight)
        optimizer = MAKERS[name](weights, weight_decay=0.1)
        if is_scaled:
            optimizer.grad_scale, optimizer.found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        prepare(optimizer)
        with Launches() as seen:
            optimizer.step()  # also makes the state
            seen.names.clear()
            optimizer.step()
    return seen.names


SYNCS = {"_local_scalar_dense", "is_nonzero", "equal"}


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.10 launches one kernel a tensor for the trust ratios")
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("lars inside", {"_foreach_norm", "_foreach_addcmul", "_fused_sgd_"}),
        ("lars outside", {"_foreach_norm", "_foreach_addcmul", "_fused_sgd_"}),
        ("lamb", {"_foreach_norm", "_foreach_addcmul", "_fused_adam_", "_fused_sgd_"}),
        ("lion", {"_foreach_lerp", "_foreach_sign_", "_fused_sgd_"}),
        ("muon", {"baddbmm", "_foreach_mul_", "_fused_sgd_"}),
    ],
)
def test_fused_gpu_step_neither_syncs_nor_grows_with_the_number_of_tensors(name, kernels, is_scaled):
    seen = launches(5, name=name, is_scaled=is_scaled)
    assert launches(15, name=name, is_scaled=is_scaled) == seen
    assert not SYNCS & set(seen)
    assert kernels <= set(seen)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_fused_gpu_step_of_shampoo_syncs_where_roots_are_due_alone(is_scaled):
    def far_from_roots(optimizer):
        optimizer._calls_before_roots = 9

    seen = launches(5, name="shampoo", is_scaled=is_scaled, prepare=far_from_roots)
    assert not SYNCS & set(seen)
    assert {"mm", "_fused_sgd_"} <= set(seen)
    with pytest.raises(DataDependentOutputException):  # what it asks the device for has no value here
        launches(5, name="shampoo", is_scaled=is_scaled)


def test_fused_launches_of_a_loop_are_seen():
    """Cases without a foreach kernel in torch: factors on the device, other dtypes, other strides."""
    with FakeTensorMode():
        tensors = [torch.empty(2, 3, device="cuda") for _ in range(7)]
        with Launches() as seen:
            torch._foreach_mul_(tensors, list(torch.empty(7, device="cuda").unbind()))
            torch._foreach_mul_(tensors, torch.empty((), device="cuda", dtype=torch.float64))
            torch._foreach_add_(tensors, [torch.empty(3, 2, device="cuda").t() for _ in tensors])
            torch._foreach_add_(tensors, tensors)
    assert seen.names == ["_foreach_mul_"] * 14 + ["_foreach_add_"] * 8


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *((LARS, key) for key in ("lr", "momentum", "weight_decay", "trust_coefficient", "eps")),
        *((LAMB, key) for key in ("lr", "weight_decay", "eps")),
        *((Lion, key) for key in ("lr", "weight_decay")),
        *((kind, key) for kind in (Muon, Shampoo) for key in ("lr", "momentum", "weight_decay")),
        (Shampoo, "eps"),
    ],
)
def test_fused_refuses_a_setting_that_is_no_finite_number_of_at_least_zero(kind, key):
    others = [torch.tensor([0.1, 0.2]), torch.tensor(0.1, device="meta")] if key == "lr" else [torch.tensor(1.0)]
    for value in (-0.1, math.nan, math.inf, None, *others):
        with pytest.raises(ValueError, match=rf"^{key} .* {re.escape(str(value))}"):
            kind(random_weights(), **({"lr": 1.0} | {key: value}))
    if key == "lr":
        with pytest.raises(ValueError, match=r"^lr .* nan"):
            kind(random_weights(), lr=torch.tensor(math.nan))


@pytest.mark.parametrize(
    ("kind", "key", "values", "legal"),
    [
        (LARS, "momentum_form", ["heavy_ball"], "lr_inside, lr_outside"),
        (LAMB, "eps", [0.0], "positive"),
        (Muon, "newton_schulz_steps", [0, 2.5, True], "at least 1"),
        (Muon, "newton_schulz_precision", ["fp8"], "fp32, bf16"),
        (Shampoo, "block_size", [0], "at least 1"),
        (Shampoo, "root_every_steps", [True, 2.5], "at least 1"),
        (Shampoo, "factor_decay", [1.0], "below 1"),
        (Shampoo, "eps", [0.0], "positive"),
    ],
)
def test_fused_refuses_a_setting_that_is_out_of_range(kind, key, values, legal):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{key} must be .*{legal}.*{re.escape(str(value))}"):
            kind(random_weights()[:1], lr=0.1, **{key: value})


@pytest.mark.parametrize("kind", [LAMB, Lion])
@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9,), 0.9, (0.9, 0.99, 0.9)])
def test_fused_refuses_betas_that_are_not_two_or_keep_everything(kind, betas):
    with pytest.raises(ValueError, match=r"^betas "):
        kind(random_weights(), lr=1.0, betas=betas)


@KINDS
def test_fused_refuses_parameters_of_half_precision_or_with_gaps(kind):
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=naming(f"{kind.__name__} ", "float32", str(dtype), "master")):
            kind(random_weights(dtype=dtype), lr=1.0)
    with pytest.raises(ValueError, match=naming(f"{kind.__name__} ", ".contiguous()")):
        kind([torch.zeros(4, 6)[:, ::2].requires_grad_()], lr=1.0)


@KINDS
def test_fused_refuses_sparse_gradients(kind):
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=naming(f"{kind.__name__} ", "sparse=False")):
        kind(embedding.parameters(), lr=1.0).step()


@KINDS
@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3)])
def test_fused_leaves_a_weight_without_elements_beside_others(kind, shape):
    weights = [torch.ones(2, 3, requires_grad=True), torch.ones(shape, requires_grad=True)]
    alone = torch.ones(2, 3, requires_grad=True)
    for params in (weights, [alone]):
        for weight in params:
            weight.grad = torch.full_like(weight, 0.5)
        kind(params, lr=0.1, **({"eps": 1e-6} if kind is Shampoo else {})).step()
    assert weights[1].shape == shape
    torch.testing.assert_close(weights[0], alone)


@KINDS
def test_fused_group_that_is_refused_leaves_the_optimizer_as_it_was(kind):
    optimizer = kind(random_weights()[:2], lr=1.0)
    with pytest.raises(ValueError, match=r"^weight_decay .*-1"):
        optimizer.add_param_group({"params": random_weights(1), "weight_decay": -1.0})
    assert len(optimizer.param_groups) == 1
