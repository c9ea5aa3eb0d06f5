"""Name and state of the device."""

import re
import subprocess
from typing import Any

import torch

from benchmarks.record import cpu_name

ASKED = {
    "driver": "driver_version",
    "power_limit": "power.limit",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "max_sm_clock": "clocks.max.sm",
    "temperature_celsius": "temperature.gpu",
}
"""Condition: its name in nvidia-smi."""


def device_name(device: torch.device) -> str:
    """Return the name that distinguishes records of different machines."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def file_stem(device: torch.device, *, size: str) -> str:
    """Name the file of the device's record: gpu-nvidia-h100-80gb-hbm3, or gpu-small-amd-epyc."""
    words = ["gpu", *([size] if size != "full" else []), device_name(device)]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def device_conditions(device: torch.device) -> dict[str, Any]:
    """List versions; of a GPU also driver, clocks, power limit and temperature at this moment, with their units."""
    found: dict[str, Any] = {"device": device_name(device), "torch_build": torch.__version__}
    if device.type != "cuda":
        return found | {"threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        **_ask_driver(f"GPU-{properties.uuid}"),
    }


def _ask_driver(gpu: str) -> dict[str, str | None]:
    """Ask nvidia-smi; None for all values without nvidia-smi, as in some containers."""
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(ASKED.values())}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(ASKED)
    return dict(zip(ASKED, (word.strip() for word in line.split(",")), strict=True))
