"""Facts from a GPU's driver: its energy and its clock."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from bigbatch.trainer.machine.gpu_driver import Clock, EnergyMeter, read_clock


class FakeNvml:
    """A driver that counts 1500 mJ at every look."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, is_there: bool = True) -> None:
        self.is_there, self.count = is_there, 0

    def nvmlInit(self) -> None:
        if not self.is_there:
            raise self.NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "GPU-12-34"
        self.count += 1
        if self.count > 2:
            raise self.NVMLError
        return 1500 * self.count

    NVML_CLOCK_SM = 1
    reasons: int | None = 0

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("GPU-12-34", self.NVML_CLOCK_SM)
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        if self.reasons is None:
            raise self.NVMLError
        return self.reasons


def test_energy_is_what_the_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    gpu = torch.device("cuda", 0)
    for nvml, told in ((FakeNvml(), True), (FakeNvml(is_there=False), False), (None, False)):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        meter = EnergyMeter(gpu)
        joules = meter.take_joules()
        assert (joules == 1.5) if told else math.isnan(joules)
        assert math.isnan(meter.take_joules()), "a driver that stops to answer ends no training"
    assert math.isnan(EnergyMeter(torch.device("cpu")).take_joules())


def test_a_clock_is_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    gpu = torch.device("cuda", 0)
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for reasons, slowed_by in (
        (0x4, ()),  # its ordinary power limit
        (0x44, ("heat",)),
        (0xC0, ("heat", "its power supply's brake")),
    ):
        nvml.reasons = reasons
        assert read_clock(gpu) == Clock(1980.0, slowed_by)
    nvml.reasons = None
    assert read_clock(gpu) is None, "an old driver does not report it"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_clock(gpu) is None
    assert read_clock(torch.device("cpu")) is None
