"""A residual block's last norm, sum and ReLU by kernels of their own, for any number of ghost batches.

Forward: sums of x - shift and of its square in one pass, where the compiler's Welford divides once per element; the
program that ends last finishes them in a fixed order, so that no second kernel is launched and bits repeat. ReLU's mask
is one bit. Backward: both sums in one pass, the norm's gradient, then the gradient at the block's border, which adds
that of the convolutions; it reads mask and gradient once more, with 2.1 bytes instead of the 4 of a stored gradient.
Between two blocks the border's sum can be computed inside the sums of the block before: that is the change of
two_blocks, by a kernel.
"""

# mypy: ignore-errors
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from benchmarks.gpu.prototypes.common import Comparison, Kernel, Prototype, Values, compiled_as_today, fastest, main
from benchmarks.gpu.prototypes.kernels.block_end import apply, border, gradient_sums, moments, norm_gradient

Tile: TypeAlias = tuple[int, int, int]
SUMMED: tuple[Tile, ...] = ((64, 64, 8), (128, 64, 8), (32, 64, 4))
"""Rows, channels and warps of the kernels that sum; a GPU takes the fastest."""
WRITTEN: tuple[Tile, ...] = ((16, 256, 8), (32, 256, 8))
"""Those of the kernels that write; 256 channels fill a sector of 32 bytes with bits."""
PROGRAMS, MOST_PARTS = 512, 128
"""Programs of a kernel that sums, four per multiprocessor; and those whose sums one program adds at the end."""
EPS, MOMENTUM = 1e-5, 0.1
LARGE = ((256, 256, 56, 1), (256, 1024, 14, 4), (32, 256, 56, 1))
"""Images, channels, side, and ghost batches."""
TODAY = {1: (4, 5), 2: (5, 6), 4: (5, 6)}
"""Ghost batches -> launches of forward and backward today, as lowered for layer3.1 (tests/support/lowered_gpu.py)."""
TODAY_BYTES = (9, 19)
"""Those of an element, in forward and in backward."""


def parts_of(shape: tuple[int, ...], tile: tuple[int, ...]) -> int:
    """Return how many programs share a ghost batch of a shape like those of LARGE."""
    images, channels, side, ghosts = shape
    return parts_for(images // ghosts * side**2, others=channels // tile[1] * ghosts, tile=tile[0])


def parts_for(rows: int, *, others: int, tile: int) -> int:
    """Return how many programs share the rows of a ghost batch: a power of two, summed by one program."""
    most = max(1, min(MOST_PARTS, PROGRAMS // others, triton.cdiv(rows, tile)))
    return triton.next_power_of_2(most + 1) // 2


class BlockEnd:
    """Tensors of one block's end, and its forward and backward by today's kernels, by new ones, and in fp64."""

    def __init__(self, images: int, channels: int, side: int, *, ghosts: int, device: torch.device) -> None:
        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            made = torch.randn(shape, generator=generator, device=device).to(dtype)
            return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made

        generator = torch.Generator(device).manual_seed(0)
        self.shape, self.ghosts = (images, channels, side, side), ghosts
        self.rows = images // ghosts * side * side
        levels_C11 = 4 * normal(channels, 1, 1)
        self.x = normal(*self.shape) + levels_C11  # means of several standard deviations
        # eighths, whose sum bf16 holds: all sum the same values
        self.grad, self.branch = ((8 * normal(*self.shape)).round() / 8 for _ in range(2))
        self.weight, self.bias = (normal(channels, dtype=torch.float32) for _ in range(2))
        self.weight += 1
        self.momenta = torch.full((ghosts,), MOMENTUM, device=device)
        self.shortcut = normal(*self.shape)
        sign = self._normed(self.x, self.weight, self.bias)[0].flatten(0, 1) + self.shortcut
        # no argument of ReLU near 0, where rounding would choose the gradient
        self.shortcut += torch.where(sign.abs() < 0.1, 0.2 * sign.sign(), 0).to(torch.bfloat16)
        self.running = torch.zeros_like(self.weight), torch.ones_like(self.weight)
        self.counters = torch.zeros(2, ghosts * channels, dtype=torch.int32, device=device)
        self.partials = torch.empty(2, ghosts, MOST_PARTS, 2, channels, device=device)
        self.mean, self.inverse, self.variance, self.grad_sum, self.unit_sum = torch.empty(
            5, ghosts, channels, device=device
        )
        self.bits = torch.empty(self.x.numel() // 8, dtype=torch.uint8, device=device)
        images, _, height, width = self.shape
        self.next_bits = torch.randint(256, self.bits.shape, generator=generator, device=device, dtype=torch.uint8)
        places = torch.arange(8, device=device, dtype=torch.uint8)
        is_zero = (self.next_bits[:, None] >> places) & 1 == 0
        self.next_mask = is_zero.view(images, height, width, channels).permute(0, 3, 1, 2)
        self.sums_compiled = compiled_as_today(self._sums, device)
        self.forward_compiled = compiled_as_today(self._forward, device)
        self.backward_compiled = compiled_as_today(self._backward, device)
        self.border_compiled = compiled_as_today(lambda g, mask, branch: torch.where(mask, 0, g) + branch, device)
        self.kept = self.forward_compiled(self.x, self.shortcut, self.weight, self.bias, *self.running)
        # on a CPU several blocks of channels, as large shapes have
        tiles = WRITTEN if device.type == "cuda" else ((16, 64, 8),)
        self.summed, self.written = SUMMED[0], tiles[0]
        self.forward_new()  # fills what backward reads
        self.summed = fastest(SUMMED, lambda tile: self._both(tile, self.written), device)
        self.written = fastest(tiles, lambda tile: self._both(self.summed, tile), device)

    @property
    def note(self) -> str:
        return f"tiles {self.summed} and {self.written}"

    def restore(self) -> None:
        """Write the running statistics before the step, which forward_new changes in place."""
        self.running[0].zero_()
        self.running[1].fill_(1)

    def forward_today(self) -> Values:
        y, _, _, _, *kept = self.forward_compiled(self.x, self.shortcut, self.weight, self.bias, *self.running)
        return {"y": y, "running mean": kept[0], "running var": kept[1]}

    def forward_new(self) -> Values:
        y, running, size = torch.empty_like(self.x), self.running, (self.rows, self.shape[1])
        self._sum(
            moments, self.x, self.partials[0], self.counters[0], self.mean, self.inverse, self.variance, *size, EPS
        )
        self._write(
            apply, self.x, self.shortcut, y, self.bits, self.weight, self.bias, self.mean, self.inverse, self.variance,
            *running, self.momenta, *size, self.ghosts,
        )  # fmt: skip
        return {"y": y, "running mean": running[0], "running var": running[1]}

    def backward_today(self) -> Values:
        _, mask, mean, inverse, *_ = self.kept
        x_grad, weight_grad, bias_grad = self.backward_compiled(self.grad, mask, self.x, self.weight, mean, inverse)
        block = self.border_compiled(self.grad, mask, self.branch)
        return {"x": x_grad, "weight": weight_grad, "bias": bias_grad, "block": block}

    def backward_new(self) -> Values:
        x_grad, block = torch.empty_like(self.x), torch.empty_like(self.x)
        weight_grad, bias_grad = torch.empty_like(self.weight), torch.empty_like(self.bias)
        masked_grad, size, sums = (self.grad, self.bits), (self.rows, self.shape[1]), (self.grad_sum, self.unit_sum)
        self._sum_gradients(self.grad, has_border=False)
        self._write(
            norm_gradient, *masked_grad, self.x, self.weight, self.mean, self.inverse, *sums, x_grad, weight_grad,
            bias_grad, *size, self.ghosts,
        )  # fmt: skip
        self._write(border, *masked_grad, self.branch, block, *size)
        return {"x": x_grad, "weight": weight_grad, "bias": bias_grad, "block": block}

    def _sum_gradients(self, grad: Tensor, *, has_border: bool) -> None:
        self._sum(
            gradient_sums, grad, self.bits, self.x, self.mean, self.inverse, self.partials[1], self.counters[1],
            self.grad_sum, self.unit_sum, self.grad, self.next_bits, self.branch, self.rows, self.shape[1], has_border,
        )  # fmt: skip

    def border_today(self) -> Values:
        block = self.border_compiled(self.grad, self.next_mask, self.branch)
        _, mask, mean, inverse, *_ = self.kept
        total, products = self.sums_compiled(block, mask, self.x, self.weight, mean, inverse)
        return {"block": block, "sum": total.flatten(1), "unit sum": products.flatten(1)}

    def border_new(self) -> Values:
        block = torch.empty_like(self.x)
        self._sum_gradients(block, has_border=True)
        return {"block": block, "sum": self.grad_sum, "unit sum": self.unit_sum}

    def border_exact(self) -> Values:
        block = torch.where(self.next_mask, 0, self.grad.double()) + self.branch.double()
        _, mask, mean, inverse, *_ = self._forward(self.x, self.shortcut, *self._exact_affine(), *self._exact_running())
        total, products = self._sums(block, mask, self.x, self.weight.double(), mean, inverse)
        return {"block": block, "sum": total.flatten(1), "unit sum": products.flatten(1)}

    def forward_exact(self) -> Values:
        y, *_, mean, var = self._forward(self.x, self.shortcut, *self._exact_affine(), *self._exact_running())
        return {"y": y, "running mean": mean, "running var": var}

    def backward_exact(self) -> Values:
        affine, grad = self._exact_affine(), self.grad.double()
        _, mask, mean, inverse, *_ = self._forward(self.x, self.shortcut, *affine, *self._exact_running())
        x_grad, weight_grad, bias_grad = self._backward(grad, mask, self.x, affine[0], mean, inverse)
        block = torch.where(mask, 0, grad) + self.branch.double()
        return {"x": x_grad, "weight": weight_grad, "bias": bias_grad, "block": block}

    def _exact_affine(self) -> tuple[Tensor, Tensor]:
        return self.weight.double(), self.bias.double()

    def _exact_running(self) -> tuple[Tensor, Tensor]:
        mean, var = self.running
        return mean.double(), var.double()

    def _normed(self, x, weight, bias) -> tuple[Tensor, ...]:
        """Return the norm of each ghost batch in the dtype of weight, with variance, mean and 1/std."""
        ghosts = x.unflatten(0, (self.ghosts, -1)).to(weight.dtype)
        var, mean = torch.var_mean(ghosts, dim=(1, 3, 4), correction=0, keepdim=True)
        inverse = torch.rsqrt(var + EPS)
        unit = (ghosts - mean) * inverse
        return unit * weight[:, None, None] + bias[:, None, None], var, mean, inverse

    def _forward(self, x, shortcut, weight, bias, running_mean, running_var) -> tuple[Tensor, ...]:
        """Compute the end of a block without projection, in the dtype of weight; results are in that of x.

        A run leaves its sum and ReLU to the compiler, behind NormalizeGhostViews of the norm alone. Only a block with a
        projection joins both norms, sum and ReLU there.
        """
        dtype = x.dtype if weight.dtype == torch.float32 else weight.dtype
        normed, var, mean, inverse = self._normed(x, weight, bias)
        y = torch.relu(normed.to(dtype).flatten(0, 1) + shortcut)
        for each in range(self.ghosts):
            unbiased = var[each].flatten() * (self.rows / (self.rows - 1))
            running_mean = MOMENTUM * mean[each].flatten() + (1 - MOMENTUM) * running_mean
            running_var = MOMENTUM * unbiased + (1 - MOMENTUM) * running_var
        return y, y <= 0, mean, inverse, running_mean, running_var

    def _masked_and_unit(self, grad, mask, x, weight, mean, inverse) -> tuple[Tensor, Tensor]:
        ghosts, grad = (t.unflatten(0, (self.ghosts, -1)).to(weight.dtype) for t in (x, torch.where(mask, 0, grad)))
        return grad, (ghosts - mean) * inverse

    def _sums(self, grad, mask, x, weight, mean, inverse) -> tuple[Tensor, Tensor]:
        grad, unit = self._masked_and_unit(grad, mask, x, weight, mean, inverse)
        total, products = (t.sum((1, 3, 4), keepdim=True) for t in (grad, grad * unit))
        return total, products

    def _backward(self, grad, mask, x, weight, mean, inverse) -> tuple[Tensor, ...]:
        total, products = self._sums(grad, mask, x, weight, mean, inverse)
        grad, unit = self._masked_and_unit(grad, mask, x, weight, mean, inverse)
        x_grad = (grad - total / self.rows - unit * (products / self.rows)) * (inverse * weight[:, None, None])
        dtype = x.dtype if weight.dtype == torch.float32 else weight.dtype
        return x_grad.to(dtype).flatten(0, 1), products.flatten(1).sum(0), total.flatten(1).sum(0)

    def _both(self, summed: Tile, written: Tile) -> None:
        self.summed, self.written = summed, written
        self.forward_new()
        self.backward_new()

    def _sum(self, kernel: Any, *arguments: Any) -> None:
        rows, width, warps = self.summed
        images, channels, side, _ = self.shape
        assert channels % width == 0
        parts = parts_of((images, channels, side, self.ghosts), self.summed)
        kernel[(channels // width, parts, self.ghosts)](*arguments, parts, rows, width, num_warps=warps)

    def _write(self, kernel: Any, *arguments: Any) -> None:
        rows, width, warps = self.written
        width = min(width, self.shape[1])
        assert self.shape[1] % width == 0
        kernel[(self.shape[1] // width * triton.cdiv(self.rows, rows), 1, self.ghosts)](
            *arguments, rows, width, num_warps=warps
        )


def comparisons(device: torch.device, is_small: bool) -> Iterator[Comparison]:
    """Compare forward and backward."""
    for images, channels, side, ghosts in ((6, 128, 5, 2),) if is_small else LARGE:
        end = BlockEnd(images, channels, side, ghosts=ghosts, device=device)
        words = f"{images} images of {channels} x {side} x {side}, ghosts {ghosts}"
        elements = end.x.numel()
        yield Comparison(
            name=f"forward, {words}", today=end.forward_today, new=end.forward_new, exact=end.forward_exact,
            elements=elements, today_bytes=TODAY_BYTES[0], new_bytes=8.125,
            today_launches=TODAY[ghosts][0], new_launches=2, worst=3, note=end.note, restore=end.restore,
        )  # fmt: skip
        yield Comparison(
            name=f"backward, {words}", today=end.backward_today, new=end.backward_new, exact=end.backward_exact,
            elements=elements, today_bytes=TODAY_BYTES[1], new_bytes=16.375,
            today_launches=TODAY[ghosts][1], new_launches=3, worst=3, note=end.note,
        )  # fmt: skip
        yield Comparison(
            name=f"border in the sums, {words}", today=end.border_today, new=end.border_new, exact=end.border_exact,
            elements=elements, today_bytes=12, new_bytes=8.25, today_launches=4, new_launches=1,
            worst=3, note=end.note, item=6,
        )  # fmt: skip


HALF = ("x", "shortcut", "y", "grad", "branch", "block_grad", "x_grad", "next_grad")
OTHER = {
    "bits": "*u8:16",
    "next_bits": "*u8:16",
    "counters": "*i32:16",
    "eps": "fp32",
    "rows": "i32:16",
    "channels": "i32:16",
}


def kernels() -> Iterator[Kernel]:
    """List each kernel with each of its tiles, and the constants that the large shapes give; a launch knows a 1."""
    known = dict.fromkeys(HALF, "*bf16:16") | OTHER
    for function in (moments, apply, gradient_sums, norm_gradient, border):
        names = function.arg_names
        for rows, width, warps in SUMMED if "PARTS" in names else WRITTEN:
            sizes = {"ROWS": rows, "WIDTH": width}
            found = [
                known | sizes | {"PARTS": parts, "ghosts": 1 if ghosts == 1 else "i32", "HAS_BORDER": has_border}
                for parts, ghosts in sorted({(parts_of(shape, (rows, width)), shape[-1]) for shape in LARGE})
                for has_border in (False, True)
            ]
            arguments = [{name: values.get(name, "*fp32:16") for name in names} for values in found]
            for place, each in enumerate(arguments):
                if each not in arguments[:place]:
                    yield Kernel(function, each, {"num_warps": warps})


if __name__ == "__main__":
    main(
        Prototype(
            name="block_end",
            item=2,
            change="last norm, sum and ReLU: one-pass sums, finished by the last program; mask of bits",
            expected_ms=(2.0, 3.0),
            comparisons=comparisons,
            kernels=list(kernels()),
        )
    )
