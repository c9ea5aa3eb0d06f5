"""Measure how fast a rank multiplies matrices and copies memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from bigbatch.trainer.machine.gpu_driver import Clock, read_clock
from bigbatch.trainer.machine.host import seconds_of, wait_for

CPU_SIDE, GPU_SIDE = 768, 8192
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
MIN_REPEATS = 5
BUSY_REPEATS = 64
"""Products that keep a GPU busy while its clock is read: about 0.1 s."""


@dataclass(frozen=True)
class Rates:
    """Holds medians over repeats."""

    multiply_gflops: float
    """10^9 floating-point operations per second: fp32 on a CPU, bf16 on a GPU."""
    copy_gb_per_second: float
    """10^9 bytes per second, each read and written once, counted once."""
    clock: Clock | None
    """Clock during the products; None for a CPU, or if the driver does not report it."""
    cpu_share: float | None = None
    """Share of the threads' time in which they ran during the products, beside other processes. None for a GPU."""


def make_product(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], object], int]:
    """Return a function that multiplies two large square matrices, and its floating-point operations."""
    side = GPU_SIDE if device.type == "cuda" else CPU_SIDE
    # random numbers, since a GPU draws little power, and heats up little, on constant ones
    a_NN, b_NN, out_NN = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(3))
    return partial(torch.mm, a_NN, b_NN, out=out_NN), 2 * side**3


def measure_rates(device: torch.device, *, seconds: float) -> Rates:
    """Measure rates, half of the time for each, on the device and the threads of this rank."""
    product, flops = make_product(torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    began, ran = time.perf_counter(), time.process_time()
    multiply = median_seconds(product, device, seconds=seconds / 2)
    waited = (time.perf_counter() - began) * torch.get_num_threads()
    cpu_share = min(1.0, (time.process_time() - ran) / waited) if device.type == "cpu" else None
    clock = None
    if device.type == "cuda":
        for _ in range(BUSY_REPEATS):
            product()
        clock = read_clock(device)
        wait_for(device)
    num_bytes = COPY_BYTES[device.type]
    source_N: Tensor = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target_N = torch.empty_like(source_N)
    copy = median_seconds(lambda: target_N.copy_(source_N), device, seconds=seconds / 2)
    return Rates(flops / multiply / 1e9, num_bytes / copy / 1e9, clock, cpu_share)


def median_seconds(work: Callable[[], object], device: torch.device, *, seconds: float) -> float:
    """Return the median seconds of work, repeated after a warm-up: neither hiccups nor lucky repeats count."""
    work()
    wait_for(device)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < MIN_REPEATS or time.perf_counter() < end:
        taken.append(seconds_of(work, device))
    return median(taken)
