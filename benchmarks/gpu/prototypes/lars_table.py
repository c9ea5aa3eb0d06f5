"""LARS over a table of chunks: two launches for all tensors, which read half-precision gradients themselves.

Today's update copies the gradients to fp32, computes norms, adds the decay, scales, updates, and rounds to half
precision: 60 bytes per parameter in 32 launches. 26 of them take less than 5 microseconds: they compute norms' weights
or a few numbers. Here one kernel sums the squares of each chunk, and the next one adds those of its tensor in a fixed
order, and writes fp32 weight, momentum and half-precision weight: 26 bytes in 2 launches, at 32 images as at 256.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from benchmarks.gpu.prototypes.common import Comparison, Kernel, Prototype, Values, main
from bigbatch.trainer.models import build_model
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.param_groups import param_groups
from bigbatch.trainer.step.precision import Precision, grads_of, step_or_skip_

CHUNK = 4096
"""Elements of a tensor that one program reads and writes."""
TODAY_LAUNCHES = 32
"""For any number of weights, in two groups."""
RATE, WEIGHT_DECAY, MOMENTUM, TRUST = 0.5, 5e-5, 0.9, 1.0
SETTINGS = {"momentum": MOMENTUM, "trust_coefficient": TRUST, "eps": 0.0}


@triton.jit
def part_of(chunks, tensors, MULTIPLE: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's tensor, its row of the table, the indices of the chunk, and whether they exist."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    row = tensors + 9 * tensor
    index = (chunk - tl.load(row + 5)) * CHUNK + tl.arange(0, CHUNK)
    return tensor, row, index, index < tl.multiple_of(tl.load(row + 4), MULTIPLE)


@triton.jit
def pointer(row, column, index, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers to elements of one of a row's tensors."""
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(dtype)), 16) + index


@triton.jit
def gradient(row, index, is_there, numbers, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return elements of a gradient, divided by the loss scale."""
    if tl.load(row + 8) == 1:
        grad = tl.load(pointer(row, 2, index, HALF), is_there, 0.0).to(tl.float32)
    else:
        grad = tl.load(pointer(row, 2, index, tl.float32), is_there, 0.0)
    return grad / tl.load(numbers + 1)


@triton.jit
def sum_squares(  # type: ignore[no-untyped-def]
    chunks,
    tensors,
    squares,
    numbers,
    num_chunks,
    HALF: tl.constexpr,
    MULTIPLE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the sums of squares of a chunk of a weight and of its gradient."""
    _, row, index, is_there = part_of(chunks, tensors, MULTIPLE, CHUNK)
    w = tl.load(pointer(row, 0, index, tl.float32), is_there, 0.0)
    g = gradient(row, index, is_there, numbers, HALF)
    tl.store(squares + tl.program_id(0), tl.sum(w * w))
    tl.store(squares + num_chunks + tl.program_id(0), tl.sum(g * g))


@triton.jit
def update(  # type: ignore[no-untyped-def]
    chunks,
    tensors,
    squares,
    numbers,
    num_chunks,
    decays,
    momentum,
    trust_coefficient,
    eps,
    IS_INSIDE: tl.constexpr,
    IS_NESTEROV: tl.constexpr,
    MOST: tl.constexpr,
    HALF: tl.constexpr,
    MULTIPLE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Update a chunk of a weight, its momentum and its half-precision copy."""
    if tl.load(numbers + 2) == 1:
        return
    tensor, row, index, is_there = part_of(chunks, tensors, MULTIPLE, CHUNK)
    rate = tl.load(numbers)
    decay = tl.load(decays + tensor)
    # each program adds all squares of its tensor, in the same order
    place = tl.arange(0, MOST)
    own = squares + tl.load(row + 5) + place
    is_own = place < tl.load(row + 6)
    w_norm = tl.sqrt_rn(tl.sum(tl.load(own, is_own, 0.0)))
    g_norm = tl.sqrt_rn(tl.sum(tl.load(own + num_chunks, is_own, 0.0)))
    adapts = (tl.load(row + 7) == 1) & (w_norm > 0) & (g_norm > 0)
    ratio = tl.where(adapts, trust_coefficient * w_norm / (g_norm + decay * w_norm + eps), 1.0)
    w_at, v_at = pointer(row, 0, index, tl.float32), pointer(row, 1, index, tl.float32)
    w = tl.load(w_at, is_there, 0.0)
    added = ratio * (rate if IS_INSIDE else 1.0) * (gradient(row, index, is_there, numbers, HALF) + decay * w)
    v = momentum * tl.load(v_at, is_there, 0.0) + added
    w -= (1.0 if IS_INSIDE else rate) * (added + momentum * v if IS_NESTEROV else v)
    tl.store(w_at, w, is_there)
    tl.store(v_at, v, is_there)
    if tl.load(row + 8) == 1:
        tl.store(pointer(row, 3, index, HALF), w.to(HALF), is_there)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A weight as optimizer and model have it; the tensors have the same strides."""

    weight: Tensor
    momentum: Tensor
    grad: Tensor
    half: Tensor | None
    """Copy of the weight in the gradient's dtype; None if the model has the fp32 weight."""
    weight_decay: float
    adapts: bool


class LarsTable:
    """LARS of trainer/optim/lars.py; as in a CUDA graph, the tensors stay where they are."""

    def __init__(self, weights: Sequence[Trained], **settings: float) -> None:
        """settings: momentum, trust_coefficient, eps, IS_INSIDE for momentum_form lr_inside, IS_NESTEROV."""
        rows, chunks = list[list[int]](), list[int]()
        for each in weights:
            tensors = (each.weight, each.momentum, each.grad, each.weight if each.half is None else each.half)
            addresses = [tensor.data_ptr() for tensor in tensors]
            # the kernels walk raw memory, 16 bytes at a time
            assert all(tensor.stride() == each.weight.stride() for tensor in tensors)
            assert torch.ops.aten.is_non_overlapping_and_dense(each.weight), "a weight has gaps"
            assert not any(address % 16 for address in addresses)
            places = [each.weight.numel(), len(chunks), triton.cdiv(each.weight.numel(), CHUNK)]
            # the nine columns that the kernels read
            rows.append([*addresses, *places, each.adapts, each.half is not None])
            chunks += [len(rows) - 1] * places[-1]
        device = weights[0].weight.device
        self._tables = [torch.tensor(chunks, dtype=torch.int32, device=device), torch.tensor(rows, device=device)]
        self._squares_2C = torch.empty(2, len(chunks), device=device)
        self._decays_N = torch.tensor([each.weight_decay for each in weights], device=device)
        half = next(each.half.dtype for each in weights if each.half is not None)
        # without this number, the compiler would not load 16 bytes at a time
        multiple = math.gcd(8, *(each.weight.numel() for each in weights))
        self._form: dict[str, Any] = {
            "HALF": getattr(tl, str(half).removeprefix("torch.")),
            "MULTIPLE": multiple,
            "CHUNK": CHUNK,
        }
        self._grad_addresses = [row[2] for row in rows]
        self._settings = {"MOST": triton.next_power_of_2(max(row[6] for row in rows)), **settings}

    def step_(self, grads: Iterable[Tensor], numbers_3: Tensor) -> None:
        """Update all weights by (learning rate, divisor of the gradients, 1 to skip the step), fp32 on the device.

        grads: those of the weights, in the memory that the table names.
        """
        assert [grad.data_ptr() for grad in grads] == self._grad_addresses, "a gradient moved"
        count = self._squares_2C.shape[1]
        arguments = (*self._tables, self._squares_2C, numbers_3, count)
        sum_squares[(count,)](*arguments, **self._form, num_warps=8)
        update[(count,)](*arguments, self._decays_N, **self._settings, **self._form, num_warps=8)


@torch.no_grad()
def gathered_(tensors: Sequence[Tensor]) -> Tensor:
    """Move tensors into one vector, so that their values can be compared without a copy; return the vector."""
    sizes = [-(-tensor.numel() // 64) * 64 for tensor in tensors]
    vector_M = tensors[0].new_zeros(sum(sizes))
    for tensor, part in zip(tensors, vector_M.detach().split(sizes), strict=True):
        tensor.data = part[: tensor.numel()].as_strided(tensor.shape, tensor.stride()).copy_(tensor)
    return vector_M


def model_of(device: torch.device, *, is_small: bool) -> nn.Module:
    """Make ResNet-50, or layers that fill no chunk, fill one, and need several."""
    if is_small:
        square = nn.Linear(64, 64)
        nn.init.zeros_(square.weight)  # its ratio is 1
        model: nn.Module = nn.Sequential(nn.Conv2d(3, 16, 7), nn.BatchNorm2d(16), nn.Linear(128, 65), square)
    else:
        model = build_model("resnet50", num_classes=1000, norm=nn.BatchNorm2d)
    return model.to(device).to(memory_format=torch.channels_last)


def comparison_of(
    device: torch.device,
    *,
    is_small: bool,
    form: str = "lr_inside",
    is_nesterov: bool = False,
    divisor: float | None = None,
    skips: bool = False,
) -> Comparison:
    """Compare one update of all weights of a model, from the same momentum."""
    torch.manual_seed(0)
    # Triton's interpreter truncates to bf16, and rounds to fp16
    model = model_of(device, is_small=is_small)
    precision = Precision(model, name="bf16" if device.type == "cuda" else "fp16", device=device)
    groups = param_groups(model, weight_decay=WEIGHT_DECAY, substitute=precision.masters)
    optimizer = LARS(groups, lr=RATE, trust_coefficient=TRUST, momentum_form=form, nesterov=is_nesterov)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    weights = list(precision.masters.values())
    for weight in weights:
        optimizer.state[weight]["momentum_buffer"] = torch.randn_like(weight)
    values = {
        "weight": gathered_(weights),
        "momentum": gathered_([optimizer.state[weight]["momentum_buffer"] for weight in weights]),
        "half weight": gathered_([each for each in model.parameters() if each.dtype != torch.float32]),
    }
    precision.weights.publish_()
    before = {name: vector.clone() for name, vector in values.items()}
    trained = list(trained_of(model, precision, optimizer))
    numbers_3 = torch.tensor([RATE, divisor or 1.0, skips], device=device)
    for group in optimizer.param_groups:
        group["lr"] = numbers_3[0]
    table = LarsTable(trained, **SETTINGS, IS_INSIDE=form == "lr_inside", IS_NESTEROV=is_nesterov)

    def restore() -> None:
        for name, vector in before.items():
            values[name].copy_(vector)

    def today() -> Values:
        precision.weights.fetch_grads_()
        scale = None if divisor is None else numbers_3[1]
        step_or_skip_(optimizer, grads_of(weights), divisor=scale, skip=numbers_3[2] == 1)
        precision.weights.publish_()
        return values

    def new() -> Values:
        table.step_(grads_of(model.parameters()), numbers_3)
        return values

    words = {", Nesterov": is_nesterov, ", loss scale": divisor is not None, ", skipped": skips}
    return Comparison(
        name=form + "".join(word for word, holds in words.items() if holds),
        today=torch.no_grad()(today),
        new=new,
        exact=partial(exact, values, trained, numbers_3, form=form, is_nesterov=is_nesterov),
        restore=restore,
        elements=sum(weight.numel() for weight in weights),
        today_bytes=60,
        new_bytes=26,
        today_launches=TODAY_LAUNCHES,
        new_launches=2,
    )


def trained_of(model: nn.Module, precision: Precision, optimizer: LARS) -> Iterator[Trained]:
    """Yield the weights with their group's settings."""
    for name, parameter in model.named_parameters():
        weight = precision.masters[name]
        (group,) = (each for each in optimizer.param_groups if any(weight is each for each in each["params"]))
        assert parameter.grad is not None
        yield Trained(
            weight=weight,
            momentum=optimizer.state[weight]["momentum_buffer"],
            grad=parameter.grad,
            half=None if parameter is weight else parameter,
            weight_decay=group["weight_decay"],
            adapts=weight.dim() > 1,
        )


def exact(values: Values, weights: Sequence[Trained], numbers_3: Tensor, *, form: str, is_nesterov: bool) -> Values:
    """Compute the update from its formula, in fp64."""
    rate, divisor, skips = numbers_3.tolist()
    results = {name: vector.double() for name, vector in values.items()}
    for each in () if skips else weights:
        w, v, *halves = (
            results[name][tensor.storage_offset() :][: tensor.numel()]
            for name, tensor in zip(results, (each.weight, each.momentum, each.half), strict=True)
            if tensor is not None
        )
        g = each.grad.as_strided(w.shape, (1,)).double() / divisor
        w_norm, g_norm = w.norm(), g.norm()
        adapts = each.adapts and w_norm > 0 and g_norm > 0
        ratio = TRUST * w_norm / (g_norm + each.weight_decay * w_norm) if adapts else 1.0
        added = (rate if form == "lr_inside" else 1.0) * ratio * (g + each.weight_decay * w)
        v.mul_(MOMENTUM).add_(added)
        w.sub_((1.0 if form == "lr_inside" else rate) * (added + MOMENTUM * v if is_nesterov else v))
        for half in halves:
            half.copy_(w)
    return results


def comparisons(device: torch.device, is_small: bool) -> Iterator[Comparison]:
    """Compare the form of the recipes on ResNet-50, or every form on small layers."""
    compare = partial(comparison_of, device, is_small=is_small)
    yield compare()
    if is_small:
        yield compare(is_nesterov=True)
        yield compare(form="lr_outside", divisor=4.0)
        yield compare(form="lr_outside", is_nesterov=True)
        yield compare(skips=True)


ARGUMENTS: dict[str, Any] = {
    "chunks": "*i32:16",
    "tensors": "*i64:16",
    "squares": "*fp32:16",
    "numbers": "*fp32:16",
    "num_chunks": "i32",
    "HALF": tl.bfloat16,
    "MULTIPLE": 8,
    "CHUNK": CHUNK,
}
UPDATE: dict[str, Any] = {
    "decays": "*fp32:16",
    **dict.fromkeys(SETTINGS, "fp32"),
    "IS_INSIDE": True,
    "IS_NESTEROV": False,
    "MOST": 1024,
}
PROTOTYPE = Prototype(
    name="lars_table",
    item=7,
    change="LARS in two launches over a table of chunks, from half-precision gradients",
    expected_ms=(0.25, 0.25),
    comparisons=comparisons,
    kernels=(
        Kernel(sum_squares, ARGUMENTS, {"num_warps": 8}),
        Kernel(update, ARGUMENTS | UPDATE, {"num_warps": 8}),
    ),
)

if __name__ == "__main__":
    main(PROTOTYPE)
