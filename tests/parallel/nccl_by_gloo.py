"""`bigbatch` on ranks that train on the CPU and sum over NCCL, which gloo plays: the target of a forked job."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from played_gpus import PlayedGpus
from played_nccl import PlayedNccl

from bigbatch.cli import main
from bigbatch.comm import connect
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl

GPU = torch.device("cuda", 0)
"""What NCCL is told; its tensors are on the host."""


def _connect(env: ProcessEnv, control: JobControl, *, library: str, heals: bool, **options: Any) -> Any:
    over = TorchDistributedBackend(env, control, library=library, device=GPU, heals=heals)
    over.capabilities = replace(over.capabilities, device_types=("cpu",))
    return over


def bigbatch(*command: str) -> int:
    """Run the command; nothing but the transport knows of a GPU."""
    patch = pytest.MonkeyPatch()  # until this process ends
    PlayedGpus(1, monkeypatch=patch)
    PlayedNccl(patch, carrier="gloo")
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.setattr(connect, "backend_for", lambda device, backend: "nccl")
    patch.setattr(connect, "_require_possible", lambda *arguments, **options: None)
    patch.setitem(connect.TRANSPORTS, "nccl", f"{__name__}._connect")
    return main(command)
