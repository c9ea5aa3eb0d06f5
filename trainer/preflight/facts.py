"""What one rank says of its node before anything is measured."""

import ctypes
import os
import platform
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from bigbatch import __version__
from bigbatch.comm.conditions import source_commit
from bigbatch.comm.release import sources_digest
from bigbatch.trainer.config import Config
from bigbatch.trainer.data.shards import open_split
from bigbatch.trainer.errors import DataError

GPU_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,temperature.gpu"
ASK_SECONDS = 8
COUNT_SECONDS = 8.0


@dataclass(frozen=True)
class Facts:
    """Of a rank; of its host too, where it is the first one there."""

    rank: int
    host: str
    device: str
    node: "NodeFacts | None"


@dataclass(frozen=True)
class NodeFacts:
    """Of a host."""

    versions: dict[str, str]
    """What must be the same everywhere."""
    gpus: tuple[str, ...]
    """GPU_QUERY of each, as the driver writes it."""
    free_gb: dict[str, float]
    """Of each folder that a run writes to."""
    pictures: dict[str, int]
    """Classes, and pictures of each split."""
    complaint: str | None
    """Why pictures cannot be counted."""


def gather_facts(config: Config | None, *, rank: int, host: str, is_leader: bool, device: torch.device) -> Facts:
    """Takes a second or two where there are many pictures."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if not is_leader:
        return Facts(rank, host, name, None)
    gpus = query_gpus()
    pictures, complaint = count_in_time(config) if config else ({}, None)
    node = NodeFacts(versions(device, gpus), gpus, free_disk(config), pictures, complaint)
    return Facts(rank, host, name, node)


def nccl_version() -> str:
    """Of the library that is loaded, which may be another than torch was built with; torch's own word otherwise."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # a part of torch
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def versions(device: torch.device, gpus: tuple[str, ...]) -> dict[str, str]:
    """Of the software."""
    found = {
        "bigbatch": " ".join(filter(None, (__version__, source_commit(), f"(sources {sources_digest()})"))),
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        found["NCCL"] = nccl_version()
    if gpus:
        found["driver"] = gpus[0].split(",")[1].strip()
    return found


def query_gpus() -> tuple[str, ...]:
    """As nvidia-smi lists them; none without it."""
    argv = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.count(",") == GPU_QUERY.count(","))


def free_disk(config: Config | None) -> dict[str, float]:
    """GB that are free where a run writes."""
    folders = ["/dev/shm"]
    if config:
        folders += [config.run.directory, *([config.data.stage] if config.data.stage else [])]
    found = {}
    for folder in folders:
        there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
        found[folder] = round(shutil.disk_usage(there).free / 1e9, 3)
    return found


def count_in_time(config: Config) -> tuple[dict[str, int], str | None]:
    """count_pictures, for at most COUNT_SECONDS: storage that hangs must not hold the others."""
    found: list[tuple[dict[str, int], str | None]] = []
    counting = threading.Thread(target=lambda: found.append(count_pictures(config)), daemon=True)
    counting.start()
    counting.join(COUNT_SECONDS)
    late = f"{config.data.root} was not read within {COUNT_SECONDS:g} s: slow storage; bigbatch data pack helps"
    return found[0] if found else ({}, late)


def count_pictures(config: Config) -> tuple[dict[str, int], str | None]:
    """Classes and pictures as this node sees them, or what is wrong."""
    if config.data.loader == "synthetic":
        return {}, None
    try:
        train, val = (open_split(Path(config.data.root), split) for split in ("train", "val"))
    except DataError as error:
        return {}, str(error)
    return {"classes": len(train.classes), "training": len(train), "validation": len(val)}, None


def machine_id() -> str:
    """The same for all who share a kernel."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else f"{platform.node()}-{os.getppid()}"
