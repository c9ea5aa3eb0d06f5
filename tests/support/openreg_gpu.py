"""A GPU played by torch's openreg device: its memory is protected from the host, its streams and events are threads'.

The variable BIGBATCH_OPENREG names the folder that holds the package torch_openreg. Its kernels are the CPU's, so
values are the same there. A kernel is done when its call returns; what runs on the threads is events and waits.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = "BIGBATCH_OPENREG"
sys.path.append(os.environ[FOLDER])  # where there is none, tests/conftest.py leaves out what imports this
openreg = import_module("torch_openreg.openreg")
DEVICE = torch.device("openreg", 1)
"""The last of its two: what forgets to name one takes the first."""


class Locked:
    """Host memory that CUDA has been asked to lock."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self.count = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Refuse memory that is already locked, as CUDA does."""
        assert address not in self.addresses
        self.addresses.add(address)
        self.count += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Refuse memory that is not locked, as CUDA does."""
        self.addresses.remove(address)
        return 0


def play_gpu(monkeypatch: pytest.MonkeyPatch) -> Locked:
    """Let torch.cuda be openreg, so that code under test takes the ways that it takes on a GPU."""
    locked = Locked()
    played = {
        "is_available": lambda: True,
        "device_count": openreg.device_count,
        "current_device": openreg.current_device,
        "device": openreg.device,
        "synchronize": torch.accelerator.synchronize,
        "Stream": lambda device, priority=0: torch.Stream(device, priority=priority),
        "Event": _make_event,
        "stream": _on_stream,
        "current_stream": torch.accelerator.current_stream,
        "is_current_stream_capturing": lambda: False,
        "cudart": lambda: locked,
        "check_error": lambda code: None,
    }
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.device.type == DEVICE.type), raising=False)
    return locked


def _make_event(*, enable_timing: bool = False) -> torch.Event:
    return torch.Event(DEVICE.type, enable_timing=enable_timing)  # its first record chooses the device


@contextmanager
def _on_stream(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    yield
    torch.accelerator.set_stream(before)


# --- kernels that openreg lacks ---


def _convolution(*args: Any) -> Tensor:
    return torch.ops.aten.convolution(*map(_host, args)).to(args[0].device)


def _convolution_backward(gradient: Tensor, images: Tensor, weight: Tensor, *settings: Any) -> list[Tensor | None]:
    bias_sizes = [weight.shape[0]]
    args = (*map(_host, (gradient, images, weight)), bias_sizes, *settings)
    done = torch.ops.aten.convolution_backward(*args)
    return [each if each is None else each.to(images.device) for each in done]


def _host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _isfinite(tensor: Tensor) -> Tensor:
    return tensor.cpu().isfinite().to(tensor.device)  # its own takes float32 alone


_kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
_kernels.impl("convolution_overrideable", _convolution)
_kernels.impl("convolution_backward_overrideable", _convolution_backward)
_kernels.impl("isfinite", _isfinite)
