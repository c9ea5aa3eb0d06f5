"""Facts from a GPU's driver: compute capability and, by NVML, its handle and clock."""

from dataclasses import dataclass
from typing import Any

import torch


def find_gpu(device: torch.device) -> tuple[Any, Any] | None:
    """Return NVML and its handle of a GPU; None if nvidia-ml-py is not installed or does not know the GPU."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # CUDA may number GPUs otherwise than the driver
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the GPU's CUDA compute capability; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class Clock:
    """Current clock of a GPU's multiprocessors."""

    mhz: float
    slowed_by: tuple[str, ...]
    """Hardware reasons for a reduced clock; an ordinary power limit is not one of them."""


SLOWDOWNS = {0x40: "heat", 0x80: "its power supply's brake"}
"""Bits of NVML's reasons: HwThermalSlowdown, HwPowerBrakeSlowdown."""


def read_clock(device: torch.device) -> Clock | None:
    """Return the clock; None if nvidia-ml-py is not installed or the driver does not report it."""
    found = find_gpu(device)
    if found is None:
        return None
    nvml, handle = found
    try:
        mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:
        return None
    return Clock(float(mhz), tuple(name for bit, name in SLOWDOWNS.items() if reasons & bit))
