"""The nodes of a preflight, and findings on them from the facts and measurements of all ranks. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import Any, NamedTuple

from bigbatch.tools.preflight.checks import CHECKS
from bigbatch.trainer.config.sections import IMAGENET_COUNTS
from bigbatch.trainer.machine.gpu_driver import Clock

MIN_FREE_GB = 1.0
MIN_SHM_GB = 0.5
SLOW_SHARE = 0.7
"""Share of the median node's rate below which a node is slow. Equal nodes differ by less."""
SLOW_LINK_SHARE = 0.6
GBIT = "Gbit/s"
RATES = {"multiply_gflops": ("multiplies matrices", "GFLOP/s"), "copy_gb_per_second": ("copies memory", "GB/s")}
"""Field of a node -> what it does at this rate, and the unit."""
BUSY_SHARE = 0.75
"""Share of its cores' time below which a node is slowed by other processes. A quiet machine gives more than 0.9."""
IMAGENET = {"classes": 1000, "training": IMAGENET_COUNTS["train"], "validation": IMAGENET_COUNTS["val"]}


@dataclass(frozen=True)
class Node:
    """Describes a host of the job: facts from its first rank, and the rates of its slowest rank."""

    host: str
    versions: Mapping[str, str]
    device: str
    """Devices of its ranks."""
    num_ranks: int = 1
    address: str = ""
    free_gb: Mapping[str, float] = field(default_factory=dict)
    """Free space of each folder that a run writes to."""
    disk_trouble: Mapping[str, str] = field(default_factory=dict)
    """Folder -> reason why its free space is unknown."""
    images: Mapping[str, int] = field(default_factory=dict)
    """Classes, and images of each split."""
    complaint: str | None = None
    """Why images cannot be counted."""
    gpus: Sequence[str] = ()
    """The driver's line for each GPU."""
    troubles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a check of a single host -> its faults."""
    hardware: Mapping[str, str] = field(default_factory=dict)
    """Facts besides versions that must be equal on all hosts."""
    network: Mapping[str, str] = field(default_factory=dict)
    """Its cards and RDMA ports."""
    multiply_gflops: float = 0.0
    copy_gb_per_second: float = 0.0
    clocks: Mapping[int, Clock] = field(default_factory=dict)
    """Rank -> clock of its GPU under load, if the driver reports it."""
    link_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second to other hosts."""
    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name of a rate, or other host of a link -> each measurement of it, of which the best counts."""
    has_link_rate: bool = False
    """Whether the rate of its link is known, so that the measured one can be judged without other nodes."""
    cpu_share: float | None = None
    """Share of its cores' time that its ranks got while they multiplied; None on GPUs."""
    unreachable: Sequence[str] = ()
    """Hosts that it cannot connect to."""

    @property
    def best_link(self) -> float | None:
        """Return the bytes per second of its fastest link: a slow host is slow to all."""
        return max(self.link_bytes_per_second.values(), default=None)


@dataclass(frozen=True)
class NodeFinding:
    text: str
    hosts: tuple[str, ...] = ()
    """Hosts to exclude from the job; none if no host is at fault."""

    @classmethod
    def at(cls, host: str, text: str) -> "NodeFinding":
        return cls(f"{host}: {text}", (host,))


class Rounds(NamedTuple):
    """The best of several measurements of a rate, which counts, the lowest, and how many there are."""

    best: float
    lowest: float
    num_measured: int

    def show(self, unit: str) -> str:
        digits = 2 if unit == GBIT else 1
        return f"{self.best:,.{digits}f} {unit} (best of {self.num_measured}, lowest {self.lowest:,.{digits}f})"


def _rounds(node: Node, name: str, rate: float, *, scale: float = 1.0) -> Rounds:
    rounds = node.rounds.get(name) or (rate,)
    return Rounds(scale * max(rounds), scale * min(rounds), len(rounds))


@dataclass(frozen=True)
class SlowRate:
    """A rate far below the median node's: of a host, or of the link of two."""

    hosts: tuple[str, ...]
    text: str
    rate: Rounds
    usual: Rounds

    @property
    def is_noise(self) -> bool:
        """Return whether its own measurements differ as much as it differs from the median node's."""
        return self.usual.best - self.rate.best <= self.rate.best - self.rate.lowest

    @property
    def finding(self) -> NodeFinding:
        """Return it as a finding, which blames neither end of a link."""
        return NodeFinding(f"{' to '.join(self.hosts)}: {self.text}", self.hosts if len(self.hosts) == 1 else ())


def find_faults(nodes: Sequence[Node]) -> list[NodeFinding]:
    """List all findings; empty if all nodes are fit."""
    return [
        *clear_common(_addresses(nodes), nodes),
        *_reachability(nodes),
        *_troubles(nodes),
        *_differences(nodes),
        *_disks(nodes),
        *_data(nodes),
        *(each.finding for each in slow_rates(nodes) if not each.is_noise),
        # not shared: a clock that is slower than the others without a stated reason is its own host's fault
        *(each for why, slow in slow_clocks(nodes).items() for each in (clear_common(slow, nodes) if why else slow)),
    ]


def clear_common(found: list[NodeFinding], nodes: Sequence[Node]) -> list[NodeFinding]:
    """Return findings of one kind, without hosts if they name all of several nodes: then no single node is at fault."""
    if len(nodes) > 1 and {host for finding in found for host in finding.hosts} == {node.host for node in nodes}:
        return [replace(finding, hosts=()) for finding in found]
    return found


def remarks(nodes: Sequence[Node]) -> list[str]:
    """List remarks, which do not end the job."""
    found = []
    for check in CHECKS:
        hosts_of: dict[str, list[str]] = {}
        for node in nodes if not check.is_finding else ():
            for text in node.troubles.get(check.name, ()):
                hosts_of.setdefault(text, []).append(node.host)
        found += [f"{', '.join(hosts)}: {text}: {check.remedy}" for text, hosts in hosts_of.items()]
    noise = "noise: repeated measurements differ as much, so no node is named"
    found += [f"{noise}: {each.finding.text}" for each in slow_rates(nodes) if each.is_noise]
    counts = next((dict(node.images) for node in nodes if node.images), {})
    if counts.get("classes") == IMAGENET["classes"] and counts != IMAGENET:
        shown = f"{counts['training']:,} training and {counts['validation']:,} validation images"
        found.append(
            f"1,000 classes, but {shown}: ImageNet has {IMAGENET['training']:,} and {IMAGENET['validation']:,}"
        )
    return found


def _troubles(nodes: Sequence[Node]) -> list[NodeFinding]:
    found = []
    for check in CHECKS:
        if check.is_finding:
            pairs = [(node.host, text) for node in nodes for text in node.troubles.get(check.name, ())]
            found += clear_common([NodeFinding.at(host, f"{text}: {check.remedy}") for host, text in pairs], nodes)
    return found


def _addresses(nodes: Sequence[Node]) -> list[NodeFinding]:
    remedy = "which other nodes cannot reach: fix /etc/hosts there, or state --interface"
    local = [node for node in nodes if node.address.startswith("127.") and len(nodes) > 1]
    return [NodeFinding.at(node.host, f"its address is {node.address}, {remedy}") for node in local]


def _reachability(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Blame a node that most others cannot reach, or that cannot reach most; else name the pair."""
    found, blamed = [], set()
    for node in nodes:
        others = len(nodes) - 1
        not_reached_by = [other.host for other in nodes if node.host in other.unreachable]
        # with two nodes, either may be at fault
        if others > 1 and max(len(not_reached_by), len(node.unreachable)) > others / 2:
            blamed.add(node.host)
            text = f"{len(not_reached_by)} of {others} nodes cannot connect to {node.address}; it cannot connect to"
            remedy = "look at its interface, cable and firewall"
            found.append(NodeFinding.at(node.host, f"{text} {len(node.unreachable)} of them: {remedy}"))
    for node in nodes:
        for other in node.unreachable:
            if not blamed & {node.host, other}:
                found.append(NodeFinding(f"{node.host} cannot connect to {other}: a firewall or a route between them"))
    return found


def _differences(nodes: Sequence[Node]) -> list[NodeFinding]:
    names = dict.fromkeys(name for node in nodes for name in node.versions)
    each: dict[str, dict[str, str]] = {name: {n.host: n.versions.get(name, "none") for n in nodes} for name in names}
    each["device"] = {node.host: node.device for node in nodes}
    parts = dict.fromkeys(name for node in nodes for name in node.hardware)
    each |= {name: {node.host: node.hardware.get(name, "none") for node in nodes} for name in parts}
    return [
        NodeFinding.at(host, f"{name} {values[host]}, elsewhere {usual}: all nodes need the same")
        for name, values in each.items()
        for host, usual in find_minority(values)
    ]


def find_minority(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List (host, value of the majority) of hosts that differ; in a tie the first host's value counts."""
    counts = Counter(map(str, values.values()))
    usual = max(counts, key=lambda value: counts[value])
    return [(host, usual) for host, value in values.items() if str(value) != usual]


def _disks(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Return findings on disks, for each folder: findings on a shared folder must not hide those on a local one."""
    found = []
    for folder in dict.fromkeys(folder for node in nodes for folder in (*node.free_gb, *node.disk_trouble)):
        silent = [
            NodeFinding.at(node.host, f"{folder}: {node.disk_trouble[folder]}")
            for node in nodes
            if folder in node.disk_trouble
        ]
        is_shm = folder == "/dev/shm"
        least = MIN_SHM_GB if is_shm else MIN_FREE_GB
        remedy = "free some" + (", or start the container with a larger one (--shm-size 1g)" if is_shm else "")
        full = [
            NodeFinding.at(node.host, f"{folder} has {left:g} GB left, below {least:g}: {remedy}")
            for node in nodes
            if (left := node.free_gb.get(folder, least)) < least
        ]
        found += [*clear_common(silent, nodes), *clear_common(full, nodes)]
    return found


def _data(nodes: Sequence[Node]) -> list[NodeFinding]:
    bad = [NodeFinding.at(node.host, node.complaint) for node in nodes if node.complaint]
    if len(bad) == len(nodes):  # no node's fault
        return [NodeFinding(str(nodes[0].complaint))]
    named = ((node.host, node.images.items()) for node in nodes if not node.complaint)
    counts = {host: ", ".join(f"{number:,} {name}" for name, number in images) for host, images in named}
    odd = find_minority(counts)
    return bad + [NodeFinding.at(host, f"has {counts[host]} images, elsewhere {usual}") for host, usual in odd]


def slow_rates(nodes: Sequence[Node]) -> list[SlowRate]:
    """Find nodes that compute, copy or send far more slowly than the median node, and slow paths between others."""
    found = slow_links(nodes)
    for name, (what, unit) in RATES.items() if nodes else ():  # none if a rank did not answer
        rates = {node.host: _rounds(node, name, getattr(node, name)) for node in nodes}
        usual = median_high(rates.values())
        for node in nodes:
            if (rate := rates[node.host]).best < SLOW_SHARE * usual.best:
                text = f"{what} at {rate.show(unit)}, the median node at {usual.show(unit)}: {_cause_of_slowness(node)}"
                found.append(SlowRate((node.host,), text, rate, usual))
    return found


def _cause_of_slowness(node: Node) -> str:
    if node.cpu_share is None:
        return "look for other processes, heat and power caps"
    got = f"its ranks got {node.cpu_share:.0%} of their cores' time"
    if node.cpu_share < BUSY_SHARE:
        return f"{got}, so a neighbour's load slows it, not the hardware: end other processes, or take whole nodes"
    return f"{got}, so no other process slows it: look for heat and power caps"


def slow_clocks(nodes: Sequence[Node]) -> dict[tuple[str, ...], list[NodeFinding]]:
    """Find GPUs that the hardware slows down under load, by reason; under (): those far below the median clock."""
    clocks = [(node.host, rank, clock) for node in nodes for rank, clock in node.clocks.items()]
    found: dict[tuple[str, ...], list[NodeFinding]] = {}
    usual = median_high([clock.mhz for *_, clock in clocks]) if clocks else 0.0
    for host, rank, clock in clocks:
        if clock.slowed_by or clock.mhz < SLOW_SHARE * usual:
            why = f", slowed by {' and '.join(clock.slowed_by)}" if clock.slowed_by else ""
            text = f"the GPU of rank {rank} runs at {clock.mhz:,.0f} MHz{why}; the median GPU runs at {usual:,.0f}"
            remedy = "look at nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE there"
            found.setdefault(clock.slowed_by, []).append(NodeFinding.at(host, f"{text}: {remedy}"))
    return found


def slow_links(nodes: Sequence[Node]) -> list[SlowRate]:
    """Find the part of slow_rates that is of links."""
    links = {
        (node.host, other): _rounds(node, other, rate, scale=8 / 1e9)
        for node in nodes
        for other, rate in node.link_bytes_per_second.items()
    }
    best: dict[str, Rounds] = {}
    for (host, _), rate in links.items():
        best[host] = max(rate, best.get(host, rate))
    if len(best) < 3:  # the only link of two nodes has no other to compare with
        return []
    usual = median_high(best.values())
    least = SLOW_LINK_SHARE * usual.best
    slow = [host for host, rate in best.items() if rate.best < least]  # a slow host is slow to all
    remedy = f"the median node's {usual.show(GBIT)}: look at cable, port and interface"
    found = [
        SlowRate((host,), f"its link carries {best[host].show(GBIT)}, {remedy}", best[host], usual) for host in slow
    ]
    return found + [
        SlowRate(pair, f"{rate.show(GBIT)}, the median node's link {usual.show(GBIT)}", rate, usual)
        for pair, rate in links.items()
        # each pair once, from the host that sorts first
        if pair[0] < pair[1] and rate.best < least and not {*pair}.intersection(slow)
    ]


def unjudged_link(nodes: Sequence[Node]) -> str | None:
    """Return why the only link of two nodes cannot be judged; None if it can, or if there is none."""
    rates = [node.best_link for node in nodes if node.best_link is not None]
    if len(rates) != 2 or any(node.has_link_rate for node in nodes):
        return None
    return (
        f"the link of {' and '.join(node.host for node in nodes)} carries {gbit(min(rates))} and cannot be judged: no "
        "third node, no stated rate; state it by --link-gbit"
    )


def gbit(bytes_per_second: float) -> str:
    """Show 1.25e8 as '1.00 Gbit/s'."""
    return f"{8 * bytes_per_second / 1e9:.2f} {GBIT}"
