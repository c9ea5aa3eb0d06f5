"""A residual block's last norm, sum and ReLU by kernels of their own, for any number of ghost batches.

Forward: sums of x - shift and of its square in one pass, where the compiler's Welford divides once per element; the
program that ends last finishes them in a fixed order, so that no second kernel is launched and bits repeat. ReLU's mask
is one bit. Backward: both sums in one pass, the norm's gradient, then the gradient at the block's border, which adds
that of the convolutions; it reads mask and gradient once more, with 2.1 bytes instead of the 4 of a stored gradient.
Between two blocks the border's sum can be computed inside the sums of the block before: that is the change of
two_blocks, by a kernel.
"""

# Triton compiles a function with the annotations of its module, and a kernel's arguments have none
# mypy: ignore-errors
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.prototypes.common import Comparison, Kernel, Prototype, Values, compiled_as_today, fastest, main

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


@triton.jit
def channels_of(channels, WIDTH: tl.constexpr):
    """Return this program's channels as (WIDTH / 8, 8): the last dimension is a byte of mask, and 16 bytes of bf16."""
    return 8 * bytes_of(channels, WIDTH)[:, None] + tl.arange(0, 8)[None, :]


@triton.jit
def bytes_of(channels, WIDTH: tl.constexpr):
    """Return the bytes of mask; neighbours among programs have neighbouring channels."""
    return tl.program_id(0) % (channels // WIDTH) * (WIDTH // 8) + tl.arange(0, WIDTH // 8)


@triton.jit
def rows_of(channels, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the rows of a program that writes. They are in the first dimension of the grid: others end at 65,535."""
    return tl.program_id(0) // (channels // WIDTH) * ROWS + tl.arange(0, ROWS)


@triton.jit
def load(tensor, row, channel, channels, end):
    """Load (rows, WIDTH / 8, 8) in fp32; 0 from row end on."""
    index = row[:, None, None] * channels + channel[None, :, :]
    return tl.load(tensor + index, (row < end)[:, None, None], 0.0).to(tl.float32)


@triton.jit
def store(tensor, value, row, channel, channels, end):
    index = row[:, None, None] * channels + channel[None, :, :]
    tl.store(tensor + index, value.to(tensor.dtype.element_ty), (row < end)[:, None, None])


@triton.jit
def load_bits(bits, row, channels, end, WIDTH: tl.constexpr):
    """Load ReLU's bits as (rows, WIDTH / 8, 8)."""
    byte = tl.load(bits + row[:, None] * (channels // 8) + bytes_of(channels, WIDTH)[None, :], (row < end)[:, None], 0)
    return (byte[:, :, None].to(tl.int32) >> tl.arange(0, 8)[None, None, :]) & 1


@triton.jit
def load_masked(grad, bits, row, channel, channels, end, WIDTH: tl.constexpr):
    """Load a gradient, 0 where ReLU's bit is 0."""
    keeps = load_bits(bits, row, channels, end, WIDTH)
    return tl.where(keeps > 0, load(grad, row, channel, channels, end), 0.0)


@triton.jit
def is_last(counter, num):
    """Count this program's arrival; return whether all num have arrived. The counter is then 0 for the next launch."""
    tl.debug_barrier()  # the stores of all threads come before the count of one
    has_all = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num - 1
    tl.store(counter, 0, has_all)
    return has_all


@triton.jit
def store_partials(partials, first, second, channel, channels, PARTS: tl.constexpr):
    """Store the sums over a program's rows; return where those of all programs of the ghost batch begin."""
    of_ghost = partials + tl.program_id(2) * PARTS * 2 * channels + channel
    part = tl.program_id(1)
    tl.store(of_ghost + 2 * part * channels, tl.sum(first, 0))
    tl.store(of_ghost + (2 * part + 1) * channels, tl.sum(second, 0))
    return of_ghost


@triton.jit
def sum_partials(of_ghost, channels, PARTS: tl.constexpr):
    """Add what all programs stored; past L1, which does not see their stores."""
    places = of_ghost[None, :, :] + (2 * tl.arange(0, PARTS) * channels)[:, None, None]
    first = tl.sum(tl.load(places, cache_modifier=".cg"), 0)
    return first, tl.sum(tl.load(places + channels, cache_modifier=".cg"), 0)


@triton.jit
def moments(
    x, partials, counters, mean, inverse, variance, rows, channels, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute mean, 1/std and biased variance of each channel of each ghost batch."""
    block, part, ghost, channel = tl.program_id(0), tl.program_id(1), tl.program_id(2), channels_of(channels, WIDTH)
    x += ghost.to(tl.int64) * rows * channels
    # near the mean, so that squares lose no digits: the mean of the first rows
    shift = tl.sum(load(x, tl.arange(0, ROWS), channel, channels, rows), 0) / tl.minimum(ROWS, rows)
    size = tl.cdiv(rows, PARTS)
    end = tl.minimum((part + 1) * size, rows)
    total = tl.zeros((ROWS, WIDTH // 8, 8), tl.float32)
    squares = tl.zeros((ROWS, WIDTH // 8, 8), tl.float32)
    for start in range(part * size, end, ROWS):
        row = start + tl.arange(0, ROWS)
        value = load(x, row, channel, channels, end) - shift[None, :, :]
        value = tl.where((row < end)[:, None, None], value, 0.0)
        total += value
        squares += value * value
    of_ghost = store_partials(partials, total, squares, channel, channels, PARTS)
    if is_last(counters + ghost * tl.num_programs(0) + block, PARTS):
        first, second = sum_partials(of_ghost, channels, PARTS)
        moved = first / rows
        var = tl.maximum(second / rows - moved * moved, 0.0)
        place = ghost * channels + channel
        tl.store(mean + place, shift + moved)
        tl.store(variance + place, var)
        tl.store(inverse + place, tl.rsqrt(var + eps))


@triton.jit
def apply(
    x, shortcut, y, bits, weight, bias, mean, inverse, variance, running_mean, running_var, momenta,
    rows, channels, ghosts, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write relu(norm(x) + shortcut), and its argument's sign; one program per channel also the running statistics."""
    ghost, channel = tl.program_id(2), channels_of(channels, WIDTH)
    row = rows_of(channels, ROWS, WIDTH)
    before, place = ghost.to(tl.int64) * rows * channels, ghost * channels + channel
    scale = tl.load(inverse + place) * tl.load(weight + channel)
    value = (load(x + before, row, channel, channels, rows) - tl.load(mean + place)) * scale + tl.load(bias + channel)
    value += load(shortcut + before, row, channel, channels, rows)
    store(y + before, tl.maximum(value, 0.0), row, channel, channels, rows)
    byte = tl.sum((value > 0).to(tl.int32) << tl.arange(0, 8)[None, None, :], 2)
    places = row[:, None] * (channels // 8) + bytes_of(channels, WIDTH)[None, :]
    tl.store(bits + before // 8 + places, byte.to(tl.uint8), (row < rows)[:, None])
    if (tl.program_id(0) < channels // WIDTH) & (ghost == 0):
        kept_mean, kept_var = tl.load(running_mean + channel), tl.load(running_var + channel)
        unbiased = rows / (rows - 1.0)
        for each in range(ghosts):
            momentum = tl.load(momenta + each)
            kept_mean += momentum * (tl.load(mean + each * channels + channel) - kept_mean)
            kept_var += momentum * (tl.load(variance + each * channels + channel) * unbiased - kept_var)
        tl.store(running_mean + channel, kept_mean)
        tl.store(running_var + channel, kept_var)


@triton.jit
def gradient_sums(
    grad, bits, x, mean, inverse, partials, counters, grad_sum, unit_sum, next_grad, next_bits, branch, rows, channels,
    HAS_BORDER: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum the masked gradient, and its product with the normalised x, of each channel of each ghost batch.

    HAS_BORDER: grad is written first, as the sum of both branches of the next block.
    """
    block, part, ghost, channel = tl.program_id(0), tl.program_id(1), tl.program_id(2), channels_of(channels, WIDTH)
    before, place = ghost.to(tl.int64) * rows * channels, ghost * channels + channel
    center = tl.load(mean + place)
    size = tl.cdiv(rows, PARTS)
    end = tl.minimum((part + 1) * size, rows)
    total = tl.zeros((ROWS, WIDTH // 8, 8), tl.float32)
    products = tl.zeros((ROWS, WIDTH // 8, 8), tl.float32)
    for start in range(part * size, end, ROWS):
        row = start + tl.arange(0, ROWS)
        if HAS_BORDER:
            value = load_masked(next_grad + before, next_bits + before // 8, row, channel, channels, end, WIDTH)
            value = (value + load(branch + before, row, channel, channels, end)).to(grad.dtype.element_ty)
            store(grad + before, value, row, channel, channels, end)
            masked = value.to(tl.float32)
        else:
            masked = load(grad + before, row, channel, channels, end)
        masked = tl.where(load_bits(bits + before // 8, row, channels, end, WIDTH) > 0, masked, 0.0)
        total += masked
        products += masked * (load(x + before, row, channel, channels, end) - center[None, :, :])
    of_ghost = store_partials(partials, total, products, channel, channels, PARTS)
    if is_last(counters + ghost * tl.num_programs(0) + block, PARTS):
        first, second = sum_partials(of_ghost, channels, PARTS)
        tl.store(grad_sum + place, first)
        tl.store(unit_sum + place, second * tl.load(inverse + place))


@triton.jit
def norm_gradient(
    grad, bits, x, weight, mean, inverse, grad_sum, unit_sum, x_grad, weight_grad, bias_grad,
    rows, channels, ghosts, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x; one program per channel also those of weight and bias."""
    ghost, channel = tl.program_id(2), channels_of(channels, WIDTH)
    row = rows_of(channels, ROWS, WIDTH)
    before, place = ghost.to(tl.int64) * rows * channels, ghost * channels + channel
    scale = tl.load(inverse + place)
    level, slope = tl.load(grad_sum + place) / rows, tl.load(unit_sum + place) / rows * scale
    masked = load_masked(grad + before, bits + before // 8, row, channel, channels, rows, WIDTH)
    pull = level + (load(x + before, row, channel, channels, rows) - tl.load(mean + place)) * slope
    store(x_grad + before, (masked - pull) * (scale * tl.load(weight + channel)), row, channel, channels, rows)
    if (tl.program_id(0) < channels // WIDTH) & (ghost == 0):
        level, slope = tl.zeros_like(scale), tl.zeros_like(scale)
        for each in range(ghosts):
            level += tl.load(grad_sum + each * channels + channel)
            slope += tl.load(unit_sum + each * channels + channel)
        tl.store(bias_grad + channel, level)
        tl.store(weight_grad + channel, slope)


@triton.jit
def border(grad, bits, branch, block_grad, rows, channels, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the gradient of the block's input: that through the convolutions and that through the shortcut."""
    ghost, channel = tl.program_id(2), channels_of(channels, WIDTH)
    row = rows_of(channels, ROWS, WIDTH)
    before = ghost.to(tl.int64) * rows * channels
    value = load_masked(grad + before, bits + before // 8, row, channel, channels, rows, WIDTH)
    value += load(branch + before, row, channel, channels, rows)
    store(block_grad + before, value, row, channel, channels, rows)


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
        sign = self._argument(torch.float32)
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

    def _argument(self, dtype: torch.dtype) -> Tensor:
        ghosts = self.x.unflatten(0, (self.ghosts, -1)).to(dtype)
        var, mean = torch.var_mean(ghosts, dim=(1, 3, 4), correction=0, keepdim=True)
        unit = (ghosts - mean) * torch.rsqrt(var + EPS)
        return (unit * self.weight[:, None, None] + self.bias[:, None, None]).flatten(0, 1) + self.shortcut

    def _forward(self, x, shortcut, weight, bias, running_mean, running_var) -> tuple[Tensor, ...]:
        """Compute the end of a block without projection, in the dtype of weight; results are in that of x.

        A run leaves its sum and ReLU to the compiler, behind NormalizeGhostViews of the norm alone. Only a block with a
        projection joins both norms, sum and ReLU there.
        """
        dtype = x.dtype if weight.dtype == torch.float32 else weight.dtype
        ghosts = x.unflatten(0, (self.ghosts, -1)).to(weight.dtype)
        var, mean = torch.var_mean(ghosts, dim=(1, 3, 4), correction=0, keepdim=True)
        inverse = torch.rsqrt(var + EPS)
        unit = (ghosts - mean) * inverse
        normed = (unit * weight[:, None, None] + bias[:, None, None]).to(dtype).flatten(0, 1)
        y = torch.relu(normed + shortcut)
        for each in range(self.ghosts):
            unbiased = var[each].flatten() * (self.rows / (self.rows - 1))
            running_mean = MOMENTUM * mean[each].flatten() + (1 - MOMENTUM) * running_mean
            running_var = MOMENTUM * unbiased + (1 - MOMENTUM) * running_var
        return y, y <= 0, mean, inverse, running_mean, running_var

    def _sums(self, grad, mask, x, weight, mean, inverse) -> tuple[Tensor, Tensor]:
        ghosts, grad = (t.unflatten(0, (self.ghosts, -1)).to(weight.dtype) for t in (x, torch.where(mask, 0, grad)))
        total, products = (t.sum((1, 3, 4), keepdim=True) for t in (grad, grad * ((ghosts - mean) * inverse)))
        return total, products

    def _backward(self, grad, mask, x, weight, mean, inverse) -> tuple[Tensor, ...]:
        total, products = self._sums(grad, mask, x, weight, mean, inverse)
        ghosts, grad = (t.unflatten(0, (self.ghosts, -1)).to(weight.dtype) for t in (x, torch.where(mask, 0, grad)))
        unit = (ghosts - mean) * inverse
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
