"""The energy that a GPU has consumed, as its driver counts it."""

from typing import Any, Protocol

import torch

from bigbatch.trainer.machine.gpu_driver import find_gpu


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
