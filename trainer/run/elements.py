"""The first element in which two tensors differ, and how far apart it is."""

import torch
from torch import Tensor

INTEGERS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
"""Whose order is that of floating-point numbers of their size, but for the sign."""
DIGITS = {torch.float64: 17, torch.float32: 9, torch.float16: 5, torch.bfloat16: 4}
"""By which any two numbers of a kind can be told apart."""
Value = Tensor | int | float | str
"""What a checkpoint is made of."""


def describe_difference(a: Value, b: Value) -> str:
    """Say how many elements differ in their bits, and which is the first; empty where none does."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return "" if not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b else f"{a!r} and {b!r}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} of {a.dtype} and {tuple(b.shape)} of {b.dtype}"
    if not a.numel():
        return ""
    bits_a, bits_b = (x.flatten().view(torch.uint8).view(x.numel(), -1) for x in (a, b))
    if torch.equal(bits_a, bits_b):
        return ""
    odd_N = (bits_a != bits_b).any(dim=1).nonzero().flatten()
    first = int(odd_N[0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)] if a.dim() else []
    ours, theirs = (x.flatten()[first].item() for x in (a, b))
    ulps = ""
    if a.dtype in INTEGERS:
        steps = (_ordered(a.flatten()[first]) - _ordered(b.flatten()[first])).abs()
        ulps = f", {int(steps):,} units in the last place apart"
    digits = DIGITS.get(a.dtype)
    values = " and ".join(f"{value:.{digits}g}" if digits else str(value) for value in (ours, theirs))
    return f"{len(odd_N):,} of {a.numel():,} elements differ, first {place}: {values}{ulps}"


def _ordered(value: Tensor) -> Tensor:
    """Number floating-point values as they lie on the line, neighbours by one."""
    integers = INTEGERS[value.dtype]
    number = value.contiguous().view(integers).to(torch.int64)
    return torch.where(number < 0, torch.iinfo(integers).min - number, number)
