"""Resource limits of this process and of its job on this host."""

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bigbatch.trainer.machine.cgroup import cores_left, memory_left, tasks_left
from bigbatch.trainer.machine.kernel_files import leading_number, read_text

CAP_IPC_LOCK = 14
"""Number of a capability(7): a process that has it locks memory without a limit."""


@dataclass(frozen=True)
class Limits:
    """Limits of a process and its job; infinite if there is none or it is unknown."""

    locked_bytes: float = math.inf
    open_files: float = math.inf
    """Soft limit of a process."""
    max_open_files: float = math.inf
    """Hard limit, to which the process may raise the soft one."""
    tasks: float = math.inf
    """Threads and processes that the job may still start."""
    memory_bytes: float = math.inf
    """Bytes that the job may still allocate."""
    cores: float = math.inf


def read_limits(root: Path = Path("/")) -> Limits:
    """Read the limits of this process and of the control groups around it."""
    locked, _ = _limit(root, "Max locked memory")
    soft, hard = _limit(root, "Max open files")
    return Limits(
        math.inf if _has_capability(root, CAP_IPC_LOCK) else locked,
        soft,
        hard,
        *(math.inf if left is None else left for left in (tasks_left(root), memory_left(root), cores_left(root))),
    )


def _limit(root: Path, name: str) -> tuple[float, float]:
    """Read a soft and a hard limit (proc_pid_limits(5))."""
    for line in read_text(root / "proc/self/limits").splitlines():
        words = line.removeprefix(name).split()
        if line.startswith(name) and len(words) >= 2:
            soft, hard = (leading_number(word) for word in words[:2])
            return (math.inf if soft is None else soft), (math.inf if hard is None else hard)
    return math.inf, math.inf


def _has_capability(root: Path, number: int) -> bool:
    for line in read_text(root / "proc/self/status").splitlines():
        name, _, digits = line.partition(":")
        with suppress(ValueError):
            if name == "CapEff":
                return bool(int(digits, 16) >> number & 1)
    return False
