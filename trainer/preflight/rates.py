"""Measure how fast a rank multiplies matrices and copies memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from bigbatch.trainer.machine.gpu_driver import Clock, read_clock
from bigbatch.trainer.machine.host import wait_for

CPU_SIDE, GPU_SIDE = 768, 8192
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
LEAST_REPEATS = 5
BUSY_REPEATS = 64
"""Keep a GPU busy while its driver is asked: about 0.1 s."""


@dataclass(frozen=True)
class Rates:
    """Holds medians over repeats."""

    multiply_gflops: float
    """10^9 floating-point operations per second: fp32 on a CPU, bf16 on a GPU."""
    copy_gb_per_second: float
    """10^9 bytes per second, each read and written once, counted once."""
    clock: Clock | None
    """Clock during the products; None for a CPU, or if the driver does not report it."""


class Product:
    """Multiplies two square matrices that are large enough to keep the device busy."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        side = GPU_SIDE if device.type == "cuda" else CPU_SIDE
        # random numbers, since a GPU draws little power, and heats up little, on constant ones
        self._a_NN, self._b_NN, self._out_NN = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(3))
        self._device, self._flops = device, 2 * side**3

    def __call__(self) -> None:
        torch.mm(self._a_NN, self._b_NN, out=self._out_NN)

    def flops_per_second(self, *, seconds: float) -> float:
        """Compute the median over the repeats of so many seconds."""
        return self._flops / median_seconds(self, self._device, seconds=seconds)


def measure_rates(device: torch.device, *, seconds: float) -> Rates:
    """Measure rates, half of the time for each, on the device and the threads of this rank."""
    product = Product(torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    multiplied_per_second = product.flops_per_second(seconds=seconds / 2)
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
    return Rates(multiplied_per_second / 1e9, num_bytes / copy / 1e9, clock)


def median_seconds(work: Callable[[], object], device: torch.device, *, seconds: float) -> float:
    """Time one repeat, after one to warm up. A median, so that neither a hiccup nor a lucky moment counts."""
    work()
    wait_for(device)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < LEAST_REPEATS or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        wait_for(device)
        taken.append(time.perf_counter() - start)
    return median(taken)
