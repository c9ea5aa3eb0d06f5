"""Conditions of a measurement."""

import ctypes
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch

from bigbatch import __version__
from bigbatch.comm.backends.base import dtype_name
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.tuning.commit import source_commit
from bigbatch.cores import usable_cores


@dataclass(frozen=True)
class Conditions:
    """Versions, machines and the shape of the job: the first line of every file of figures."""

    date: str
    """UTC, to the second."""
    bigbatch: str
    commit: str | None
    """Commit of the checkout, with '+' if it was changed; None if unknown."""
    torch: str
    python: str
    kernel: str
    hosts: tuple[str, ...]
    """Host of each rank."""
    groups: tuple[tuple[int, ...], ...]
    """The ranks of each node group."""
    cores: tuple[int, ...]
    """Number of cores that each rank's process may use."""
    device: str
    """Names of the ranks' devices, each name once."""
    launcher: str
    """none: a single process, or a launcher that the variables do not identify."""
    backend: str
    wire_dtype: str | None
    predivide: float
    reduce_dtype: str
    buffers: str


def gather_conditions(communicator: Communicator) -> Conditions:
    """Return the conditions of all ranks. Collective."""
    facts = communicator.gather([len(usable_cores()), communicator.env.host, device_name(communicator.device)])
    cores, hosts, devices = zip(*facts, strict=True)
    return Conditions(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        bigbatch=__version__,
        commit=communicator.gather(source_commit() if communicator.rank == 0 else None)[0],
        torch=torch.__version__,
        python=platform.python_version(),
        kernel=f"{platform.system()} {platform.release()}",
        hosts=hosts,
        groups=communicator.connection.topology.groups,
        cores=cores,
        device=", ".join(sorted({*devices})),
        launcher=communicator.env.started_by,
        backend=communicator.transport.backend.name,
        predivide=communicator.wire.predivide,
        **settings_of(communicator),
    )


def settings_of(communicator: Communicator) -> dict[str, Any]:
    """Return the values of SETTINGS, as given to connect()."""
    wire = communicator.wire
    return {
        "wire_dtype": dtype_name(wire.dtype) if wire.dtype else None,
        "reduce_dtype": "fp32" if wire.in_fp32 else "wire",
        "buffers": communicator.transport.buffers,
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def nccl_version() -> str:
    """Return the version of the NCCL library that is loaded, or the one torch was built with if there is no library."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # NCCL is linked into torch
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
