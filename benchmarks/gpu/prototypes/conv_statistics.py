"""A 1x1 convolution as a product that also computes the statistics of the batch norm behind it, per ghost batch.

36 of ResNet-50's 53 convolutions are 1x1; those of the first two stages wait for memory, not for tensor cores. Each
program walks down the rows of one block of channels, and merges mean and squared distances of its tiles while they are
in registers (Chan, Golub and LeVeque 1979); the program that ends last merges those of all. The statistics are those of
the rounded output, as today.
"""

# Triton compiles a function with the annotations of its module, and a kernel's arguments have none
# mypy: ignore-errors
from collections.abc import Iterator
from typing import TypeAlias

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from benchmarks.gpu.prototypes.block_end import parts_for
from benchmarks.gpu.prototypes.common import (
    Comparison,
    Kernel,
    Prototype,
    Values,
    compiled_as_today,
    fastest,
    main,
)
from benchmarks.gpu.prototypes.kernels.block_end import is_last

Tile: TypeAlias = tuple[int, int, int, int]
TILES: tuple[Tile, ...] = ((128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 3), (64, 128, 8, 4))
"""Rows and channels of the output's tile, warps, and stages of loads; a GPU takes the fastest."""
STEP = 64
"""Input channels of one step of the product."""
LARGE = ((256, 64, 256, 56, 1), (256, 128, 512, 28, 1), (256, 256, 1024, 14, 4), (256, 512, 2048, 7, 1))
"""Images, channels of input and output, side, and ghost batches."""


@triton.jit
def conv_statistics(
    x, weight, y, partials, counters, mean, variance, rows, c_in, c_out,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write y = x weight^T in the dtype of y, and mean and biased variance of its channels in each ghost batch."""
    block, part, ghost = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = block * WIDTH + tl.arange(0, WIDTH)
    x += ghost.to(tl.int64) * rows * c_in
    y += ghost.to(tl.int64) * rows * c_out
    size = tl.cdiv(tl.cdiv(rows, PARTS), ROWS) * ROWS
    end = tl.minimum((part + 1) * size, rows)
    num, center, squares = 0.0, tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for start in range(part * size, end, ROWS):
        row = start + tl.arange(0, ROWS)
        is_there = (row < end)[:, None]
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for first in range(0, c_in, STEP):
            inner = first + tl.arange(0, STEP)
            images = tl.load(x + row[:, None] * c_in + inner[None, :], is_there, 0.0)
            total = tl.dot(images, tl.load(weight + channel[None, :] * c_in + inner[:, None]), total)
        result = total.to(y.dtype.element_ty)
        tl.store(y + row[:, None] * c_out + channel[None, :], result, is_there)
        value = result.to(tl.float32)  # rows that are not there are 0
        count = tl.minimum(ROWS, end - start).to(tl.float32)
        tile_center = tl.sum(value, 0) / count
        distance = tl.where(is_there, value - tile_center[None, :], 0.0)
        shift = tile_center - center
        squares += tl.sum(distance * distance, 0) + shift * shift * (num * count / (num + count))
        center += shift * (count / (num + count))
        num += count
    of_ghost = partials + ghost * PARTS * 2 * c_out + channel
    tl.store(of_ghost + 2 * part * c_out, center)
    tl.store(of_ghost + (2 * part + 1) * c_out, squares)
    if is_last(counters + ghost * tl.num_programs(0) + block, PARTS):
        each = tl.arange(0, PARTS)
        share = tl.maximum(tl.minimum(size, rows - each * size), 0).to(tl.float32)[:, None] / rows
        places = of_ghost[None, :] + (2 * each * c_out)[:, None]
        centers = tl.load(places, cache_modifier=".cg")
        squares = tl.sum(tl.load(places + c_out, cache_modifier=".cg"), 0) / rows
        center = tl.sum(centers * share, 0)
        distance = centers - center[None, :]
        place = ghost * c_out + channel
        tl.store(mean + place, center)
        tl.store(variance + place, squares + tl.sum(share * distance * distance, 0))


class Layer:
    """Tensors of one convolution. All values are whole, and so small that bf16 holds the products: y has no error."""

    def __init__(self, images: int, c_in: int, c_out: int, side: int, *, ghosts: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter multiplies no bf16
        shapes = (images, c_in, side, side), (c_out, c_in, 1, 1)
        self.x, self.weight = (
            torch.randint(-1, 2, shape, generator=generator, device=device).to(dtype) for shape in shapes
        )
        self.x[:, 0], self.weight[:, 0] = 8, 8  # a mean unlike 0
        self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.ghosts, self.rows, self.channels = ghosts, images // ghosts * side * side, (c_in, c_out)
        self.counters = torch.zeros(ghosts * c_out, dtype=torch.int32, device=device)
        self.partials = torch.empty(ghosts, 128, 2, c_out, device=device)
        self.statistics = compiled_as_today(self._statistics, device)
        self.tile = fastest(TILES, self.new, device)

    def _statistics(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ghosts = y.unflatten(0, (self.ghosts, -1)).to(torch.float64 if y.dtype == torch.float64 else torch.float32)
        return torch.var_mean(ghosts, dim=(1, 3, 4), correction=0)

    def today(self) -> Values:
        y = F.conv2d(self.x, self.weight)
        var, mean = self.statistics(y)
        return {"y": y, "mean": mean, "var": var}

    def new(self, tile: Tile | None = None) -> Values:
        rows, width, warps, stages = tile or self.tile
        images, _, side, _ = self.x.shape
        c_in, c_out = self.channels
        y = self.x.new_empty((images, side, side, c_out)).permute(0, 3, 1, 2)
        mean, var = self.partials.new_empty(2, self.ghosts, c_out)
        assert c_in % STEP == c_out % width == 0
        blocks = c_out // width
        parts = parts_for(self.rows, others=blocks * self.ghosts, tile=rows)
        conv_statistics[(blocks, parts, self.ghosts)](
            self.x, self.weight, y, self.partials, self.counters, mean, var, self.rows, c_in, c_out,
            parts, rows, width, STEP, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return {"y": y, "mean": mean, "var": var}

    def exact(self) -> Values:
        y = torch.einsum("bchw,kc->bkhw", self.x.double(), self.weight[:, :, 0, 0].double())
        var, mean = self._statistics(y)
        return {"y": y, "mean": mean, "var": var}


def comparisons(device: torch.device, is_small: bool) -> Iterator[Comparison]:
    """Compare the last convolution of a block of each stage; one with four ghost batches."""
    small = ((4, 64, 256, 7, 1), (8, 128, 64, 9, 2))
    for images, c_in, c_out, side, ghosts in small if is_small else LARGE:
        layer = Layer(images, c_in, c_out, side, ghosts=ghosts, device=device)
        num_bytes = 2 + 2 * c_in / c_out
        yield Comparison(
            name=f"{images} images of {c_in} to {c_out} x {side} x {side}, ghosts {ghosts}",
            today=layer.today,
            new=layer.new,
            exact=layer.exact,
            elements=images * side**2 * c_out,
            today_bytes=num_bytes + 2,
            new_bytes=num_bytes,
            today_launches=4,  # lowered: three for statistics
            new_launches=1,
            worst=3,
            enough_fp32=64 if device.type == "cpu" else 1,  # the interpreter sums one by one
            note=f"tile {layer.tile}",
        )


TYPES = dict.fromkeys(("partials", "mean", "variance"), "*fp32:16")
TYPES |= dict.fromkeys(("x", "weight", "y"), "*bf16:16")
TYPES |= {"counters": "*i32:16"} | dict.fromkeys(("rows", "c_in", "c_out"), "i32:16")


def kernels() -> list[Kernel]:
    """List the kernel with each tile and each number of programs that the large shapes give."""
    constants = {
        (parts_for(images // ghosts * side**2, others=c_out // tile[1] * ghosts, tile=tile[0]), tile)
        for images, _, c_out, side, ghosts in LARGE
        for tile in TILES
    }
    return [
        Kernel(
            conv_statistics,
            TYPES | {"PARTS": parts, "ROWS": rows, "WIDTH": width, "STEP": STEP},
            {"num_warps": warps, "num_stages": stages},
        )
        for parts, (rows, width, warps, stages) in sorted(constants)
    ]


if __name__ == "__main__":
    main(
        Prototype(
            name="conv_statistics",
            item=5,
            change="1x1 convolution whose epilogue sums the next norm's statistics",
            expected_ms=(1.4, 1.7),
            comparisons=comparisons,
            kernels=kernels(),
        )
    )
