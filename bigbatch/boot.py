"""Which start of which machine this is: the same for all who share a kernel, be they in containers of their own."""

from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the kernel's word for this start of this machine; empty where the system does not tell."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
