"""Gather facts of a node in bounded time: versions, disks and images, and facts from kernel and driver."""

import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bigbatch import __version__
from bigbatch.boot import boot_id
from bigbatch.comm.rendezvous.addresses import interface_of
from bigbatch.comm.tuning.commit import source_commit
from bigbatch.errors import UserError
from bigbatch.tools.preflight.checks import Host, describe_hardware, expected_gbit, find_troubles
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.data_root import DataRoot
from bigbatch.trainer.machine.kernel_files import leading_number, read_text
from bigbatch.trainer.machine.limits import read_limits
from bigbatch.trainer.machine.network import has_rdma_devices, read_cards, read_errors, read_ports
from bigbatch.trainer.machine.nvidia import (
    Driver,
    count_gpus_on_bus,
    has_cuda_compat,
    has_gpudirect,
    query_driver,
    read_xids,
    torch_cuda,
)
from bigbatch.user_settings import states_rdma_ports

if TYPE_CHECKING:
    import torch

STORAGE_SECONDS = 8.0
"""Seconds for all queries of storage, which run at the same time."""
DRIVER_SECONDS = 18.0
"""Seconds for two calls of nvidia-smi; these have limits too, which a hanging driver can exceed."""
IS_MPS = "nvidia-cuda-mps"
"""Prefix of the names of CUDA's multi-process service's processes, which run the work of other processes."""

T = TypeVar("T")


def gather_facts(
    config: Config | None, *, device: "torch.device", list_gpus: Callable[[], Sequence[str]] = tuple
) -> dict[str, Any]:
    """Gather facts on this host, as Node's fields; it takes a second or two if there are many images.

    list_gpus: returns the driver's line for each GPU.
    """
    # started first: it continues while disks and driver are queried
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


def versions(device: "torch.device", gpus: Sequence[str]) -> dict[str, str]:
    """List the versions of the software, which must be equal on all nodes."""
    import torch  # takes seconds, and the short preflight needs none of these

    from bigbatch.comm.rendezvous.places import sources_digest
    from bigbatch.comm.tuning.conditions import nccl_version

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


def start_query(ask: Callable[[], T], *, late: T, seconds: float | None = None) -> Callable[[], T]:
    """Start a query that may hang; return a function that returns its answer, or late after seconds.

    seconds: from now on; None for STORAGE_SECONDS.
    """
    found: list[T] = []
    asking = threading.Thread(target=lambda: found.append(ask()), daemon=True)
    asking.start()
    deadline = time.monotonic() + (STORAGE_SECONDS if seconds is None else seconds)

    def answer() -> T:
        asking.join(max(0.0, deadline - time.monotonic()))
        return found[0] if found else late

    return answer


def free_disk(config: Config | None) -> tuple[dict[str, float], dict[str, str]]:
    """Return the free GB of each folder that a run writes to; and folder -> reason if that is unknown."""
    folders = ["/dev/shm"]
    if config:
        folders += [config.run.directory, *([config.data.stage] if config.data.stage else [])]
    late = f"no answer within {STORAGE_SECONDS:g} s: see whether df hangs there, too"
    answers: dict[str, Callable[[], float | str]] = {
        folder: start_query(partial(free_gb, folder), late=late) for folder in folders
    }
    found = {folder: answer() for folder, answer in answers.items()}
    numbers = {folder: value for folder, value in found.items() if isinstance(value, float)}
    return numbers, {folder: value for folder, value in found.items() if isinstance(value, str)}


def free_gb(folder: str) -> float | str:
    """Return the free GB at a folder that exists or will be made; or the reason if that is unknown."""
    try:
        path = Path(folder).absolute()
        # a run makes its folder later, on the file system of the nearest parent that exists
        there = next(place for place in (path, *path.parents) if place.exists())
        return round(shutil.disk_usage(there).free / 1e9, 3)
    except OSError as error:
        return f"{error.strerror}: give the job's user access, or name another folder"


def start_counting(config: Config | None) -> Callable[[], tuple[dict[str, int], str | None]]:
    if config is None:
        return lambda: ({}, None)
    late = f"{config.data.root} was not read within {STORAGE_SECONDS:g} s: slow storage; bigbatch data pack helps"
    return start_query(partial(count_images, config), late=({}, late))


def count_images(config: Config) -> tuple[dict[str, int], str | None]:
    """Return the numbers of classes and images that this node sees, or the fault."""
    if config.data.loader == "synthetic":
        return {}, None
    try:
        train, val = map(DataRoot(config.data.root, listed=config.data.list).open, ("train", "val"))
    except (UserError, OSError) as error:
        return {}, str(error)
    return {"classes": len(train.classes), "training": len(train), "validation": len(val)}, None


def machine_id() -> str:
    """Return an id that is equal for all processes on one kernel."""
    return boot_id() or f"{platform.node()}-{os.getppid()}"


@dataclass(frozen=True)
class RankGpu:
    """Host, process and GPU of a rank. Every rank knows those of all ranks."""

    host: str
    process: int
    uuid: str
    """UUID of the GPU; "" for a CPU, or for an AMD GPU without one."""
    may_be_shared: bool = False
    """Whether the user lets NCCL connect ranks that share it."""


def query_host(host: Host, *, gpus: Sequence[RankGpu], address: str, root: Path = Path("/")) -> Callable[[], Host]:
    """Start to query kernel and driver; the returned function waits for the answers and returns host with them.

    gpus: those of this machine's ranks.
    """
    late = Driver(complaint=f"no answer within {DRIVER_SECONDS:g} s")
    asking = start_query(query_driver if host.wants_gpus else Driver, late=late, seconds=DRIVER_SECONDS)
    reading = start_query(partial(read_host, host, address=address, root=root), late=host)

    def answer() -> Host:
        driver = asking()
        return replace(reading(), driver=driver, foreign=foreign_processes(driver.processes, gpus, root=root))

    return answer


def read_host(host: Host, *, address: str, root: Path) -> Host:
    return replace(
        host,
        limits=read_limits(root),
        cards=() if host.shares_machine else tuple(read_cards(root)),
        ports=() if host.shares_machine else tuple(read_ports(root)),
        are_ports_stated=states_rdma_ports(),
        interface=interface_of(address),
        gpus_on_bus=count_gpus_on_bus(root),
        has_gpudirect=has_gpudirect(root),
        has_rdma_devices=has_rdma_devices(root),
        torch_cuda=torch_cuda(),
        has_cuda_compat=has_cuda_compat(root),
        xids=read_xids(root),
        errors=read_errors(root),
    )


def foreign_processes(
    processes: Sequence[Mapping[str, str]], gpus: Sequence[RankGpu], *, root: Path = Path("/")
) -> dict[int, str]:
    """Return process id -> GPU of gpus, for other jobs' processes; {} in a container, where process ids differ."""
    own, uuids = {gpu.process for gpu in gpus}, {gpu.uuid for gpu in gpus}
    found = {}
    for row in processes:
        process = int(leading_number(row["pid"]) or 0)
        name = read_text(root / f"proc/{process}/comm")
        if process not in own and row["gpu_uuid"] in uuids and name and not name.startswith(IS_MPS):
            found[process] = row["gpu_uuid"]
    return found


def host_fields(host: Host, *, links: Mapping[str, float], root: Path = Path("/")) -> dict[str, Any]:
    """Return Node's fields troubles, hardware, network and has_link_rate; call it after links were measured.

    links: bytes per second to other hosts.
    """
    host = replace(
        host,
        errors_after=start_query(partial(read_errors, root), late=dict[str, float]())(),
        link_gbit_per_second=8 * max(links.values()) / 1e9 if links else None,
    )
    cards = {card.name: f"{card.gbit_per_second:g} Gbit/s, MTU {card.mtu}" for card in host.cards}
    ports = {port.name: f"{port.gbit_per_second:g} Gbit/s {port.link_layer}, {port.state}" for port in host.ports}
    found = {"troubles": find_troubles(host), "hardware": describe_hardware(host), "network": cards | ports}
    return found | {"has_link_rate": expected_gbit(host) is not None}
