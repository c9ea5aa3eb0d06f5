"""Kernels of a residual block's last norm, sum and ReLU; see benchmarks/gpu/prototypes/block_end.py.

Images are channels-last: a row is a pixel, and its channels follow each other.
"""

# Triton compiles a function with the annotations of its module, and a kernel's arguments have none
# mypy: ignore-errors
import triton
import triton.language as tl


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
