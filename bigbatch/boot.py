"""Identify the boot of this machine: the same for all processes on one kernel, also in different containers."""

from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the kernel's identifier of this boot; empty if the system has none."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
