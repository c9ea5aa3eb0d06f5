"""Facts of a node, gathered before any measurement."""

import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from bigbatch import __version__
from bigbatch.boot import boot_id
from bigbatch.comm.rendezvous.places import sources_digest
from bigbatch.comm.tuning.conditions import nccl_version, source_commit
from bigbatch.errors import DataError
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.shards import open_split

STORAGE_SECONDS = 8.0
"""Seconds for all queries of storage, which run at the same time."""

T = TypeVar("T")


def gather_facts(
    config: Config | None, *, device: torch.device, list_gpus: Callable[[], Sequence[str]] = tuple
) -> dict[str, Any]:
    """Gather facts on this host, as Node's fields; it takes a second or two where there are many images.

    list_gpus: what the driver writes of each GPU.
    """
    # started first: it goes on while disks and driver are asked
    counting = start_counting(config)
    free, trouble = free_disk(config)
    gpus = list_gpus()
    images, complaint = counting()
    return {
        "versions": versions(device, gpus),
        "gpus": gpus,
        "free_gb": free,
        "disk_trouble": trouble,
        "images": images,
        "complaint": complaint,
    }


def versions(device: torch.device, gpus: Sequence[str]) -> dict[str, str]:
    """List the versions of the software, which must be equal on all nodes."""
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


def in_time(ask: Callable[[], T], *, late: T, seconds: float | None = None) -> Callable[[], T]:
    """Start a query that may hang; return a function that waits for it, by default for STORAGE_SECONDS."""
    found: list[T] = []
    asking = threading.Thread(target=lambda: found.append(ask()), daemon=True)
    asking.start()
    deadline = time.monotonic() + (STORAGE_SECONDS if seconds is None else seconds)

    def answer() -> T:
        asking.join(max(0.0, deadline - time.monotonic()))
        return found[0] if found else late

    return answer


def free_disk(config: Config | None) -> tuple[dict[str, float], dict[str, str]]:
    """Return the free GB of each folder that a run writes to; and folder -> reason where that is unknown."""
    folders = ["/dev/shm"]
    if config:
        folders += [config.run.directory, *([config.data.stage] if config.data.stage else [])]
    late = f"no answer within {STORAGE_SECONDS:g} s: see whether df hangs there, too"
    answers: dict[str, Callable[[], float | str]] = {
        folder: in_time(partial(free_gb, folder), late=late) for folder in folders
    }
    found = {folder: answer() for folder, answer in answers.items()}
    numbers = {folder: told for folder, told in found.items() if isinstance(told, float)}
    return numbers, {folder: told for folder, told in found.items() if isinstance(told, str)}


def free_gb(folder: str) -> float | str:
    """Return the free GB of a folder that exists or will be made; or the reason if unknown."""
    try:
        path = Path(folder).absolute()
        # a run makes its folder later, on the file system of the nearest one that is there
        there = next(place for place in (path, *path.parents) if place.exists())
        return round(shutil.disk_usage(there).free / 1e9, 3)
    except OSError as error:
        return f"{error.strerror}: let the job's user in there, or name another folder"


def start_counting(config: Config | None) -> Callable[[], tuple[dict[str, int], str | None]]:
    """Start count_images with a time limit."""
    if config is None:
        return lambda: ({}, None)
    late = f"{config.data.root} was not read within {STORAGE_SECONDS:g} s: slow storage; bigbatch data pack helps"
    return in_time(partial(count_images, config), late=({}, late))


def count_images(config: Config) -> tuple[dict[str, int], str | None]:
    """Return the numbers of classes and images that this node sees, or the fault."""
    if config.data.loader == "synthetic":
        return {}, None
    try:
        train, val = (open_split(Path(config.data.root), split) for split in ("train", "val"))
    except (DataError, OSError) as error:
        return {}, str(error)
    return {"classes": len(train.classes), "training": len(train), "validation": len(val)}, None


def machine_id() -> str:
    """Return an id that is equal for all processes on one kernel."""
    return boot_id() or f"{platform.node()}-{os.getppid()}"
