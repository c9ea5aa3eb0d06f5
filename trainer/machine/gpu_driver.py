"""Facts from a GPU's driver: compute capability and, by NVML, its version, clock and consumed energy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


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
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # CUDA and the driver may number GPUs differently
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None


def _query(found: tuple[Any, Any] | None, question: Callable[[Any, Any], T]) -> T | None:
    """Return question(NVML, handle); None without NVML, or if the driver does not answer it."""
    if found is None:
        return None
    try:
        return question(*found)
    except found[0].NVMLError:
        return None


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the GPU's CUDA compute capability; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def driver_version(device: torch.device) -> str:
    """Return the version of a GPU's driver; "" if unknown."""
    return str(_query(find_gpu(device), lambda nvml, handle: nvml.nvmlSystemGetDriverVersion()) or "")


@dataclass(frozen=True)
class Clock:
    mhz: float
    slowed_by: tuple[str, ...]
    """Hardware reasons for a reduced clock; an ordinary power limit is not one of them."""


SLOWDOWNS = {0x40: "heat", 0x80: "its power supply's brake"}
"""Bits of NVML's reasons: HwThermalSlowdown, HwPowerBrakeSlowdown."""


def read_clock(device: torch.device) -> Clock | None:
    """Return the clock; None if nvidia-ml-py is not installed or the driver does not report it."""

    def read(nvml: Any, handle: Any) -> Clock:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        slowed_by = tuple(name for bit, name in SLOWDOWNS.items() if reasons & bit)
        return Clock(float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), slowed_by)

    return _query(find_gpu(device), read)


class EnergyMeter:
    """Reads a GPU's energy from NVML's counter (Volta and later); it is NaN without nvidia-ml-py."""

    def __init__(self, device: torch.device) -> None:
        self._found = find_gpu(device)
        self._last = self._read()

    def take_joules(self) -> float:
        """Return the joules since the last call, or since the start; NaN if unknown."""
        before, self._last = self._last, self._read()
        return (self._last - before) / 1000

    def _read(self) -> float:
        """Return millijoules since the driver was loaded; NaN if unknown: a silent driver must not end the training."""
        millijoules = _query(self._found, lambda nvml, handle: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
        return float("nan") if millijoules is None else millijoules
