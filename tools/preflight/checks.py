"""Checks of a single host, each with its remedy; docs/preflight.md lists them in this order. Pure.

A finding makes a job certainly fail or slow; a remark also occurs on healthy hosts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bigbatch.trainer.machine.kernel_files import leading_number
from bigbatch.trainer.machine.limits import Limits
from bigbatch.trainer.machine.network import Card, Port, usual_rate
from bigbatch.trainer.machine.nvidia import Driver
from bigbatch.user_settings import SHARING_VARIABLE
from bigbatch.words import count

MIN_OPEN_FILES = 1024
"""Open files for connections, shards and libraries: Linux's default limit."""
FILES_PER_RANK = 4
"""Open files per rank in the store's process, to which all ranks connect; it raises its soft limit to the hard one."""
MIN_TASKS = 256
"""Least tasks that a rank may start: threads of NCCL, the loader and libraries."""
MIN_MEMORY_BYTES = 1e9
"""Least memory of a rank: PyTorch alone."""
MIN_LOCKED_BYTES = 1 << 30
"""Least locked memory, for NCCL's buffers: 4 MiB per channel, peer and direction, for 32 channels and a few peers."""
RDMA_SHARE = SOCKET_SHARE = 0.5
"""Least share of a link's nominal rate, each way: far below a healthy link's, and above that of its fallback."""
MAX_SOCKET_GBIT = 1.5
"""Gbit/s that suffice for one TCP connection, however fast the card: more than a card of 1 Gbit/s carries, and less
than a busy core moves each way at once (2.0 between two emulated nodes on 2 cores at a load of 6); clouds limit a
connection to 5."""
MIN_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA of torch's build -> oldest driver that runs it (NVIDIA, CUDA Compatibility, minor version compatibility)."""
YES = ("1", "Yes")
"""Words of a driver for yes; `[N/A]` and the like are not among them."""


@dataclass(frozen=True)
class Host:
    """Describes one host of the job. Unknown facts are absent, and cause no finding."""

    num_ranks: int = 1
    world_size: int = 1
    wants_gpus: bool = True
    """False if the job uses the CPU by choice."""
    on_gpus: bool = False
    shares_machine: bool = False
    """Whether it shares a machine with other nodes, as emulated nodes do: its links are then no hardware."""
    may_share_gpus: bool = False
    """Whether the user lets NCCL connect ranks that share one, or slices of one."""
    own_gpus: Sequence[str] = ()
    """UUIDs of its ranks' GPUs."""
    foreign: Mapping[int, str] = field(default_factory=dict)
    """Id of a process of another job -> UUID of the GPU of this job that it uses."""
    limits: Limits = field(default_factory=Limits)
    cards: Sequence[Card] = ()
    ports: Sequence[Port] = ()
    are_ports_stated: bool = False
    """Whether NCCL_IB_HCA names the ports that NCCL uses."""
    interface: str | None = None
    """Interface through which ranks reach each other."""
    is_interface_stated: bool = False
    driver: Driver = field(default_factory=Driver)
    gpus_on_bus: int = 0
    has_gpudirect: bool = False
    has_rdma_devices: bool = True
    torch_cuda: str = ""
    """Version of CUDA that torch was built for."""
    has_cuda_compat: bool = False
    xids: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    """Error counters of its ports, before links were measured."""
    errors_after: Mapping[str, float] = field(default_factory=dict)
    link_gbit_per_second: float | None = None
    """Measured rate of its best pair."""
    stated_gbit_per_second: float | None = None
    """Rate that the user states for a node's link."""

    @property
    def crosses_nodes(self) -> bool:
        return self.num_ranks < self.world_size

    @property
    def usable_ports(self) -> list[Port]:
        """List the ports that NCCL can use."""
        return [
            port for port in self.ports if port.is_usable and (port.link_layer != "Ethernet" or port.has_routable_gid)
        ]


Find = Callable[[Host], Iterator[str]]
"""Yields the faults, without host and remedy."""


@dataclass(frozen=True)
class Check:
    name: str
    remedy: str
    find: Find
    is_finding: bool
    """False: a remark, which does not end the job."""
    breaks_links: bool
    """Whether NCCL could not connect, so that links are not measured."""


CHECKS: list[Check] = []
"""All checks below, in the order of the report."""


def _check(name: str, remedy: str, *, is_finding: bool = True, breaks_links: bool = False) -> Callable[[Find], Find]:
    """Add the decorated function to CHECKS."""

    def add(find: Find) -> Find:
        CHECKS.append(Check(name, remedy, find, is_finding, breaks_links))
        return find

    return add


@_check("driver", "see nvidia-smi there; fix the driver, or reboot")
def _driver(host: Host) -> Iterator[str]:
    # a host without a GPU may still have nvidia-smi
    if host.wants_gpus and host.driver.complaint and (host.on_gpus or host.gpus_on_bus):
        yield f"nvidia-smi: {host.driver.complaint}"


@_check("driver version", "update the driver, or install torch for an older CUDA")
def _old_driver(host: Host) -> Iterator[str]:
    version = host.driver.gpus[0].split(",")[1:2] if host.driver.gpus else []
    number = leading_number(version[0].strip().partition(".")[0]) if version else None
    least = MIN_DRIVERS.get(int(leading_number(host.torch_cuda.partition(".")[0]) or 0), 0)
    if host.wants_gpus and not host.has_cuda_compat and number is not None and number < least:
        yield f"driver {version[0].strip()} is below {least}, which torch's build for CUDA {host.torch_cuda} needs"


@_check("unseen GPUs", "ask the scheduler or the container for them, or use --device cpu", is_finding=False)
def _unseen_gpus(host: Host) -> Iterator[str]:
    if host.wants_gpus and not host.on_gpus and host.gpus_on_bus and not host.driver.complaint:
        yield f"{host.gpus_on_bus} NVIDIA GPUs on the PCI bus, and its ranks compute on the CPU"


@_check("foreign processes", "end it, or request exclusive nodes (--sbatch exclusive)")
def _foreign(host: Host) -> Iterator[str]:
    for process, gpu in host.foreign.items():
        yield f"process {process}, which is not of this job, uses {gpu}"


def _own_health(host: Host) -> list[tuple[str, Mapping[str, str]]]:
    """List UUID and health of the ranks' GPUs."""
    return [(uuid, row) for uuid, row in host.driver.health.items() if uuid in host.own_gpus]


@_check("ECC", "have its administrator reset the GPU, and replace it if they come back")
def _memory_errors(host: Host) -> Iterator[str]:
    for uuid, row in _own_health(host):
        if (leading_number(errors := row["ecc.errors.uncorrected.volatile.total"]) or 0) > 0:
            yield f"{uuid}: {errors} uncorrected memory errors"


@_check("row remapping", "have the GPU replaced")
def _failed_rows(host: Host) -> Iterator[str]:
    for uuid, row in _own_health(host):
        if row.get("remapped_rows.failure") in YES:
            yield f"{uuid}: a row of its memory could not be remapped"


@_check("pending rows", "have its administrator reset the GPU after the job", is_finding=False)
def _pending_rows(host: Host) -> Iterator[str]:
    for uuid, row in _own_health(host):
        if row.get("remapped_rows.pending") in YES:
            yield f"{uuid}: a row of its memory waits to be remapped"


@_check("MIG", f"have it turned off (nvidia-smi -mig 0), ask for whole GPUs, or set {SHARING_VARIABLE}=1 (NCCL 2.30)")
def _mig(host: Host) -> Iterator[str]:
    # a rank on a slice has the slice's UUID, which the driver lists under its GPU
    has_slice = any(gpu not in host.driver.health for gpu in host.own_gpus)
    # a single rank has no peer
    health = host.driver.health if host.on_gpus and host.world_size > 1 and not host.may_share_gpus else {}
    for uuid, row in health.items():
        if (has_slice or uuid in host.own_gpus) and row["mig.mode.current"] == "Enabled":
            yield f"{uuid}: MIG is enabled"


@_check("PCIe width", "reseat the card, unless its slot has no more", is_finding=False)
def _narrow(host: Host) -> Iterator[str]:
    for uuid, row in _own_health(host):
        width, most = (leading_number(row[f"pcie.link.width.{which}"]) for which in ("current", "max"))
        if width is not None and width < (most or 0):
            yield f"{uuid}: x{width:g} of x{most:g} PCIe lanes"


@_check("NVLink", "see nvidia-smi nvlink -s and the fabric manager's log")
def _nvlinks(host: Host) -> Iterator[str]:
    most = max((links.active for links in host.driver.links.values()), default=0)
    for gpu, links in host.driver.links.items():
        # a GPU without any active link may have no bridge
        if host.on_gpus and links.inactive and 0 < links.active < most:
            yield f"GPU {gpu}: {links.active} active NVLinks, another GPU has {most}"


@_check("Xid", "look it up in NVIDIA's list of Xids; reset the GPU, or reboot", is_finding=False)
def _xids(host: Host) -> Iterator[str]:
    for error, times in host.xids.items():
        yield f"{error}, {times} times since the host started"


def _state(port: Port) -> str:
    return f"{port.state or 'of unknown state'} ({port.physical or 'unknown'})"


@_check("RDMA ports", "look at cable, subnet manager and addresses (ibstat, show_gids)")
def _no_port(host: Host) -> Iterator[str]:
    if host.on_gpus and host.crosses_nodes and host.ports and not host.usable_ports:
        states = ", ".join(f"{port.name} {_state(port)}" for port in host.ports)
        yield f"no InfiniBand or RoCE port carries data ({states}): gradients go over TCP"


@_check(
    "RDMA devices", "give the container /dev/infiniband (--device /dev/infiniband, or enroot's hook for Mellanox cards)"
)
def _no_device(host: Host) -> Iterator[str]:
    if host.on_gpus and host.crosses_nodes and host.usable_ports and not host.has_rdma_devices:
        yield f"{count(len(host.usable_ports), 'RDMA port')}, and no device in /dev/infiniband: gradients go over TCP"


def _lost_rails(host: Host) -> dict[Port, str]:
    """Return idle ports without which the others cannot serve the GPUs evenly: with them each has equally many."""
    layers = {port.link_layer for port in host.usable_ports}
    layer = "InfiniBand" if "InfiniBand" in layers else "Ethernet"  # where both are, Ethernet is for storage
    usable = [port for port in host.usable_ports if port.link_layer == layer]
    idle = [port for port in host.ports if port.link_layer == layer and not port.is_usable]
    num_ports, gpus = len(usable) + len(idle), host.gpus_on_bus
    uses_all = host.on_gpus and host.crosses_nodes and 0 < gpus <= host.num_ranks and not host.are_ports_stated
    if not uses_all or not usable or gpus % len(usable) == 0 or gpus % num_ports:
        return {}
    text = f"{count(len(usable), 'port')} for {gpus} GPUs, which {num_ports} would serve evenly"
    return dict.fromkeys(idle, text)


@_check("lost rails", "look at its cable and switch port (ibstat): GPUs share the other ports, and all nodes wait")
def _rails(host: Host) -> Iterator[str]:
    for port, text in _lost_rails(host).items():
        yield f"{port.name} is {_state(port)}: {text}"


@_check("idle ports", "look at its cable, unless it is meant to be free", is_finding=False)
def _idle_ports(host: Host) -> Iterator[str]:
    lost = _lost_rails(host)
    for port in host.ports if host.on_gpus and host.usable_ports else ():
        if not port.is_usable and port not in lost:
            yield f"{port.name} is {_state(port)}"


@_check("port rates", "look at cable and switch port, unless it is for storage", is_finding=False)
def _slow_ports(host: Host) -> Iterator[str]:
    for port in host.usable_ports if host.on_gpus else ():
        usual = usual_rate([other for other in host.usable_ports if other.link_layer == port.link_layer])
        if port.gbit_per_second < usual:
            yield f"{port.name} runs at {port.gbit_per_second:g} Gbit/s, most {port.link_layer} ports at {usual:g}"


@_check("GIDs", "give its interface an IP address", is_finding=False)
def _gids(host: Host) -> Iterator[str]:
    for port in host.ports if host.on_gpus and host.usable_ports else ():
        if port.is_usable and port.link_layer == "Ethernet" and not port.has_routable_gid:
            yield f"{port.name} has no RoCE v2 address"


@_check("port errors", "look at its cable", is_finding=False)
def _errors(host: Host) -> Iterator[str]:
    for name, total in host.errors_after.items():
        if (risen := total - host.errors.get(name, total)) > 0:
            yield f"{name} rose by {risen:,.0f} while links were measured"


@_check("GPUDirect", "have nvidia_peermem loaded (modprobe nvidia-peermem)", is_finding=False)
def _gpudirect(host: Host) -> Iterator[str]:
    kinds = {port.link_layer for port in host.usable_ports}
    if host.on_gpus and host.crosses_nodes and kinds & {"InfiniBand", "Ethernet"} and not host.has_gpudirect:
        yield "nvidia_peermem is not loaded, nor is dmabuf possible: gradients go through host memory"


@_check(
    "locked memory",
    "have it unlimited (ulimit -l; LimitMEMLOCK=infinity of slurmd; --ulimit memlock=-1)",
    breaks_links=True,
)
def _locked_memory(host: Host) -> Iterator[str]:
    is_registered = host.on_gpus and host.crosses_nodes and host.usable_ports
    if is_registered and host.limits.locked_bytes < MIN_LOCKED_BYTES:
        yield f"a rank may lock {host.limits.locked_bytes / 1024:,.0f} KiB, below {MIN_LOCKED_BYTES >> 10:,}"


def expected_gbit(host: Host) -> tuple[float, str] | None:
    """Return the least Gbit/s to expect of the link that the job should use, and its rate in words; None if unknown.

    That link is RDMA between GPUs, else the stated interface, or the fastest card.
    """
    if (rate := host.stated_gbit_per_second) is not None:
        return SOCKET_SHARE * rate, f"--link-gbit states {rate:g}"
    if host.on_gpus and host.usable_ports:
        rate = usual_rate(host.usable_ports)
        return RDMA_SHARE * rate, f"its {len(host.usable_ports)} RDMA ports have {rate:g}"
    names = (host.interface,) if host.is_interface_stated else [card.name for card in host.cards[:1]]
    for card in host.cards:
        if card.name in names:
            used = f", and ranks use {host.interface}" if host.interface not in (None, card.name) else ""
            least = min(SOCKET_SHARE * card.gbit_per_second, MAX_SOCKET_GBIT)
            return least, f"{card.name} has {card.gbit_per_second:g}{used}"
    return None


@_check(
    "bandwidth",
    "name the card by --interface; between GPUs --env NCCL_DEBUG=INFO must show NET/IB; look at cable and switch",
)
def _bandwidth(host: Host) -> Iterator[str]:
    expected = expected_gbit(host)
    measured = host.link_gbit_per_second
    if expected and measured is not None and measured < expected[0]:
        yield f"its best link carries {measured:.2f} Gbit/s, below {expected[0]:g}: {expected[1]}"


@_check("open files", "raise it (ulimit -n; LimitNOFILE of slurmd; --ulimit nofile=16384)", is_finding=False)
def _open_files(host: Host) -> Iterator[str]:
    most = MIN_OPEN_FILES + FILES_PER_RANK * host.world_size
    if host.limits.open_files < MIN_OPEN_FILES:
        yield f"a rank may open {host.limits.open_files:,.0f} files, below {MIN_OPEN_FILES:,}"
    elif host.limits.max_open_files < most:
        yield f"{host.limits.max_open_files:,.0f} open files at most, below {most:,} for {host.world_size:,} ranks"


@_check("threads", "raise pids.max of the job (--pids-limit of a container)", is_finding=False)
def _tasks(host: Host) -> Iterator[str]:
    if host.limits.tasks < MIN_TASKS * host.num_ranks:
        ranks = count(host.num_ranks, "rank")
        yield f"{host.limits.tasks:,.0f} more threads may start, below {MIN_TASKS} for each of {ranks}"


@_check("memory", "ask for more (--mem of Slurm, --memory of a container)", is_finding=False)
def _memory(host: Host) -> Iterator[str]:
    least = MIN_MEMORY_BYTES * host.num_ranks
    if host.limits.memory_bytes < least:
        left = host.limits.memory_bytes / 1e9
        yield f"{left:,.1f} GB of memory left, below {least / 1e9:g} for {count(host.num_ranks, 'rank')}"


@_check("cores", "ask for more (--cpus-per-rank)", is_finding=False)
def _cores(host: Host) -> Iterator[str]:
    if host.limits.cores < host.num_ranks:
        yield f"{host.limits.cores:g} cores for {count(host.num_ranks, 'rank')}"


def find_troubles(host: Host) -> dict[str, list[str]]:
    """Apply all checks; return name -> faults, for checks that found any."""
    found = {check.name: list(check.find(host)) for check in CHECKS}
    return {name: texts for name, texts in found.items() if texts}


def links_are_broken(host: Host) -> bool:
    """Return whether measuring links would fail for certain."""
    return any(True for check in CHECKS if check.breaks_links for _ in check.find(host))


def describe_hardware(host: Host) -> dict[str, str]:
    """Return the facts that must be equal on all hosts."""
    shown = {}
    if host.on_gpus:
        rates = Counter(port.gbit_per_second for port in host.usable_ports)
        shown["RDMA ports"] = ", ".join(f"{number} of {rate:g} Gbit/s" for rate, number in sorted(rates.items()))
        # the set of widths, without counts: a node may have fewer ranks than others
        widths = {row["pcie.link.width.current"] for _, row in _own_health(host)}
        shown["PCIe lanes"] = ", ".join(sorted(widths))
        shown["NVLinks"] = ", ".join(map(str, sorted({links.active for links in host.driver.links.values()})))
    return {name: text for name, text in shown.items() if text}
