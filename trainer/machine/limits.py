"""Limits of this process, and the memory, cores and threads that its control groups (version 1 or 2) still allow."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bigbatch.trainer.machine.kernel_files import leading_number, read_number, read_text
from bigbatch.trainer.machine.numa import parse_cores

CAP_IPC_LOCK = 14
"""Number of a capability(7): a process that has it locks memory without a limit."""
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that keep files in memory, charged to the process that writes them."""

V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


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
        tasks_left(root),
        memory_left(root),
        cores_left(root),
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


def lies_in_memory(path: Path, *, root: Path = Path("/")) -> bool:
    """Return whether files at path lie in memory, as in /dev/shm; False if unknown. Raises: OSError."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = (root / "proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    # the device number is the third word; the file system's type follows " - "
    kinds = (mount.partition(" - ")[2].split(" ")[0] for mount in mounts if mount.split(" ")[2] == number)
    return any(kind in IN_MEMORY for kind in kinds)


def memory_left(root: Path = Path("/")) -> float:
    """Return the bytes that this process's job may still allocate, by its strictest group; infinite without a limit.

    The page cache does not count: the kernel reclaims it.
    """
    found = (_memory_left(group, *(V1 if is_first else V2)) for group, is_first in own_groups("memory", root))
    return min((left for left in found if left is not None), default=math.inf)


def tasks_left(root: Path) -> float:
    """Return how many threads and processes this process's job may still start; infinite without a limit."""
    left = []
    for group, _ in own_groups("pids", root):
        most, now = read_number(group / "pids.max"), read_number(group / "pids.current")
        if most is not None and now is not None:
            left.append(max(0.0, most - now))
    return min(left, default=math.inf)


def cores_left(root: Path) -> float:
    """Return the number of cores that this process's job may use, by CPU quota and by CPU set; infinite if unknown."""
    found = []
    for group, is_first in own_groups("cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first else ("cpu.max",)
        stated = " ".join(read_text(group / name) for name in names).split()
        quota, period = (leading_number(word) or 0 for word in (*stated, "", "")[:2])
        if quota > 0 and period > 0:  # "max" and -1 are not a quota
            found.append(quota / period)
    for group, is_first in own_groups("cpuset", root):
        with suppress(ValueError):
            if cores := parse_cores(read_text(group / ("cpuset.cpus" if is_first else "cpuset.cpus.effective"))):
                found.append(float(len(cores)))
    return min(found, default=math.inf)


def own_groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is of version 1) of a controller's groups that contain this process, innermost first.

    In a container, a folder may be a path of the host that does not exist.
    """
    groups = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if controllers == "":
            places, is_first = [groups, groups / "unified"], False
        elif controller in controllers.split(","):
            places, is_first = [groups / controller], True
        else:
            continue
        path = PurePosixPath(own.lstrip("/"))
        for place in places:
            for group in (path, *path.parents):
                yield place / group, is_first


def _memory_left(group: Path, limit: str, usage: str, cached: tuple[str, ...]) -> int | None:
    try:
        most = (group / limit).read_text().strip()
        stated = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        taken = int((group / usage).read_text()) - sum(int(stated.get(name, 0)) for name in cached)
        return None if most == "max" else max(0, int(most) - taken)
    except (OSError, ValueError):
        return None
