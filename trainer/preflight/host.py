"""Gather on a node's first rank, in bounded time, the facts that checks.py judges."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.addresses import interface_of
from bigbatch.trainer.machine.kernel_files import leading_number, read_text
from bigbatch.trainer.machine.limits import read_limits
from bigbatch.trainer.machine.network import read_cards, read_errors, read_ports
from bigbatch.trainer.machine.nvidia import Driver, ask_driver, count_on_bus, may_reach_memory, read_xids
from bigbatch.trainer.preflight.check import Host
from bigbatch.trainer.preflight.checks import describe_hardware, find_troubles
from bigbatch.trainer.preflight.facts import in_time

DRIVER_SECONDS = 18.0
"""Seconds for two calls of nvidia-smi; these have limits too, which a hanging driver can exceed."""
FILES_SECONDS = 8.0
IS_MPS = "nvidia-cuda-mps"
"""Begins the names of the processes by which CUDA's multi-process service runs what others ask of it."""


@dataclass(frozen=True)
class Seat:
    """Place where a rank computes. All ranks know all of them."""

    host: str
    process: int
    gpu: str
    """Its UUID; "" for a CPU."""
    only_gpu: str
    """The same, where the rank sees no other."""


def start_looking(host: Host, *, seats: Sequence[Seat], address: str, root: Path = Path("/")) -> Callable[[], Host]:
    """Start to query kernel and driver; the returned function waits for the answers and completes host with them.

    seats: of the ranks of this machine.
    """
    late = Driver(complaint=f"no answer within {DRIVER_SECONDS:g} s")
    asking = in_time(ask_driver if host.wants_gpus else Driver, late=late, seconds=DRIVER_SECONDS)
    reading = in_time(partial(read_host, host, address=address, root=root), late=host, seconds=FILES_SECONDS)

    def answer() -> Host:
        driver = asking()
        return replace(reading(), driver=driver, foreign=foreign_processes(driver.processes, seats, root=root))

    return answer


def read_host(host: Host, *, address: str, root: Path) -> Host:
    """Return host completed with the kernel's facts."""
    return replace(
        host,
        limits=read_limits(root),
        cards=() if host.shares_machine else tuple(read_cards(root)),
        ports=() if host.shares_machine else tuple(read_ports(root)),
        interface=interface_of(address),
        gpus_on_bus=count_on_bus(root),
        has_gpudirect=may_reach_memory(root),
        xids=read_xids(root),
        errors=read_errors(root),
    )


def foreign_processes(
    processes: Sequence[Mapping[str, str]], seats: Sequence[Seat], *, root: Path = Path("/")
) -> dict[int, str]:
    """Return other jobs' processes on the GPUs of seats; none in a container, where process ids differ."""
    own, gpus = {seat.process for seat in seats}, {seat.gpu for seat in seats}
    found = {}
    for row in processes:
        process = int(leading_number(row["pid"]) or 0)
        name = read_text(root / f"proc/{process}/comm")
        if process not in own and row["gpu_uuid"] in gpus and name and not name.startswith(IS_MPS):
            found[process] = row["gpu_uuid"]
    return found


def report(host: Host, *, links: Mapping[str, float], root: Path = Path("/")) -> dict[str, Any]:
    """Return faults, facts that must be equal on all hosts, and network, as Node's fields; call it after measuring.

    links: bytes per second to other hosts.
    """
    host = replace(
        host,
        errors_after=in_time(partial(read_errors, root), late=dict[str, float](), seconds=FILES_SECONDS)(),
        link_gbit_per_second=8 * max(links.values()) / 1e9 if links else None,
    )
    cards = {card.name: f"{card.gbit_per_second:g} Gbit/s, MTU {card.mtu}" for card in host.cards}
    ports = {port.name: f"{port.gbit_per_second:g} Gbit/s {port.link_layer}, {port.state}" for port in host.ports}
    return {"troubles": find_troubles(host), "hardware": describe_hardware(host), "network": cards | ports}
