"""Facts from a GPU's driver: compute capability and, by NVML, its clock and the energy that it has consumed."""

from dataclasses import dataclass
from typing import Any, Protocol

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


class EnergyMeter(Protocol):
    """Counts the energy of this rank's device."""

    def take_joules(self) -> float:
        """Return the joules since the last call, or since the start; NaN if unknown."""
        ...


class NoEnergyMeter:
    """Meter for a CPU, and for a GPU with a driver that does not count energy."""

    def take_joules(self) -> float:
        """Return NaN."""
        return float("nan")


class GpuEnergy:
    """Reads NVML's counter of a GPU (Volta and later), in millijoules since the driver was loaded."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._last = self._read()

    def take_joules(self) -> float:
        """Return the joules since the last call."""
        before, self._last = self._last, self._read()
        return (self._last - before) / 1000

    def _read(self) -> float:
        """Return the counter in millijoules; a driver that stops answering does not end the training."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:
            return float("nan")


def make_energy_meter(device: torch.device) -> EnergyMeter:
    """Return a GPU's meter if nvidia-ml-py is installed and the driver counts energy; else NoEnergyMeter."""
    found = find_gpu(device)
    return NoEnergyMeter() if found is None else GpuEnergy(*found)
