"""Facts from a GPU's driver: compute capability and, by NVML, its version, clock and consumed energy."""

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


def driver_version(device: torch.device) -> str:
    """Return the version of a GPU's driver; "" if NVML does not tell it."""
    found = find_gpu(device)
    if found is None:
        return ""
    nvml, _ = found
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return ""


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


class EnergyMeter:
    """Counts a GPU's energy by NVML's counter (Volta and later); without a GPU, or nvidia-ml-py, it is unknown."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._found = None if device is None else find_gpu(device)
        self._last = self._read()

    def take_joules(self) -> float:
        """Return the joules since the last call, or since the start; NaN if unknown."""
        before, self._last = self._last, self._read()
        return (self._last - before) / 1000

    def _read(self) -> float:
        """Return millijoules since the driver was loaded; one that stops answering does not end the training."""
        if self._found is None:
            return float("nan")
        nvml, handle = self._found
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError:
            return float("nan")
