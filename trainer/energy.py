"""What a GPU's driver tells: the energy that it has consumed, and its clock."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class EnergyMeter(Protocol):
    """Counts the energy of this rank's device."""

    def take_joules(self) -> float:
        """Since the last call, or since it was made; not a number where nobody tells."""
        ...


class Untold:
    """For a device whose driver does not tell, and for a CPU."""

    def take_joules(self) -> float:
        """Not a number."""
        return float("nan")


class GpuEnergy:
    """NVML's counter of a GPU (Volta and later), in millijoules since the driver was loaded."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._last = self._read()

    def take_joules(self) -> float:
        """Since the last call."""
        before, self._last = self._last, self._read()
        return (self._last - before) / 1000

    def _read(self) -> float:
        """In millijoules; a driver that stops to answer ends no training."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:
            return float("nan")


def make_energy_meter(device: torch.device) -> EnergyMeter:
    """Of a GPU where nvidia-ml-py is installed and the driver counts; else one that knows nothing."""
    found = _find_gpu(device)
    return Untold() if found is None else GpuEnergy(*found)


@dataclass(frozen=True)
class Clock:
    """Of a GPU's multiprocessors at this moment."""

    mhz: float
    slowed_by: tuple[str, ...]
    """What the hardware holds it down for. An ordinary power limit is none of that."""


SLOWDOWNS = {0x40: "heat", 0x80: "its power supply's brake"}
"""Bits of NVML's reasons: HwThermalSlowdown, HwPowerBrakeSlowdown."""


def read_clock(device: torch.device) -> Clock | None:
    """None where nvidia-ml-py is not installed, or the driver does not tell."""
    found = _find_gpu(device)
    if found is None:
        return None
    nvml, handle = found
    try:
        mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:
        return None
    return Clock(float(mhz), tuple(name for bit, name in SLOWDOWNS.items() if reasons & bit))


def _find_gpu(device: torch.device) -> tuple[Any, Any] | None:
    """NVML and its handle of a GPU."""
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
