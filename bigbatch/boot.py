"""Identify the boot of this machine, which all containers on one kernel share, and a process within it."""

import os
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the kernel's identifier of this boot; empty if the system has none."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def own_kernel() -> str:
    """Return this boot and the PID namespace of this process, in which its number is valid; empty if unknown."""
    boot = boot_id()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


def start_ticks(pid: int | str) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended, or is a zombie."""
    # not psutil's create_time(): after the clock was set, processes compute different seconds since 1970 for one start
    try:
        # after the last ): the program's name in parentheses may hold blanks and )
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])
