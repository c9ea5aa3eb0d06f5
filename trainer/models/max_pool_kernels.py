"""Triton's kernels of a max-pool of 3 x 3 pixels with stride 2 and padding 1; all tensors are channels-last."""

# Triton compiles a function with the annotations of its module, and a kernel's arguments have none
# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def max_pool_forward(images, pooled, places, channels, height, width, num, BLOCK: tl.constexpr):
    """Write the maximum of each window, and its place: 3 * row + column of the window."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num
    column = (index // channels) % (width // 2)
    row = (index // (channels * (width // 2))) % (height // 2)
    image = index // (channels * (width // 2) * (height // 2))
    # index of the window's first pixel, which lies outside the image at the upper and left border
    first = ((image.to(tl.int64) * height + 2 * row - 1) * width + 2 * column - 1) * channels + index % channels
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.where(row > 0, 0, 3) + tl.where(column > 0, 0, 1)  # the first inside, as torch does if all are -inf
    for down in tl.static_range(3):
        for right in tl.static_range(3):
            is_inside = is_there & ((row > 0) | (down > 0)) & ((column > 0) | (right > 0))
            value = tl.load(images + first + (down * width + right) * channels, is_inside, float("-inf")).to(tl.float32)
            is_better = (value > best) | (value != value)  # a NaN replaces what was found, as in torch
            best = tl.where(is_better, value, best)
            place = tl.where(is_better, 3 * down + right, place)
    tl.store(pooled + index, best.to(pooled.dtype.element_ty), is_there)
    tl.store(places + index, place.to(tl.int8), is_there)


@triton.jit
def max_pool_backward(grad, places, images, channels, height, width, num, BLOCK: tl.constexpr):
    """Write the gradient of 2 x 2 pixels, which four windows share; height and width are those of grad."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num
    column = (index // channels) % width
    row = (index // (channels * width)) % height
    image = index // (channels * width * height)
    has_right = is_there & (column + 1 < width)
    has_below = is_there & (row + 1 < height)
    line = channels * width
    here_grad = tl.load(grad + index, is_there, 0.0).to(tl.float32)
    right_grad = tl.load(grad + index + channels, has_right, 0.0).to(tl.float32)
    below_grad = tl.load(grad + index + line, has_below, 0.0).to(tl.float32)
    last_grad = tl.load(grad + index + line + channels, has_right & has_below, 0.0).to(tl.float32)
    here = tl.load(places + index, is_there, -1)
    right = tl.load(places + index + channels, has_right, -1)
    below = tl.load(places + index + line, has_below, -1)
    last = tl.load(places + index + line + channels, has_right & has_below, -1)
    # the middle of this window is the first of the 2 x 2 pixels
    upper_left = tl.where(here == 4, here_grad, 0.0)
    upper_right = tl.where(here == 5, here_grad, 0.0) + tl.where(right == 3, right_grad, 0.0)
    lower_left = tl.where(here == 7, here_grad, 0.0) + tl.where(below == 1, below_grad, 0.0)
    lower_right = tl.where(here == 8, here_grad, 0.0) + tl.where(right == 6, right_grad, 0.0)
    lower_right += tl.where(below == 2, below_grad, 0.0) + tl.where(last == 0, last_grad, 0.0)
    wide = 2 * width * channels
    first = images + (image.to(tl.int64) * 2 * height + 2 * row) * wide + 2 * column * channels + index % channels
    dtype = images.dtype.element_ty
    tl.store(first, upper_left.to(dtype), is_there)
    tl.store(first + channels, upper_right.to(dtype), is_there)
    tl.store(first + wide, lower_left.to(dtype), is_there)
    tl.store(first + wide + channels, lower_right.to(dtype), is_there)
