"""What is wrong with which node, out of what all ranks have said and measured. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import Any

SLOW_SHARE = 0.7
"""Of the median node's rate, below which one is slow: well above half, and below what noise does to equal nodes."""
SLOW_LINK_SHARE = 0.6
LEAST_FREE_GB = 1.0
LEAST_SHM_GB = 0.5
IMAGENET = {"classes": 1000, "training": 1_281_167, "validation": 50_000}


@dataclass(frozen=True)
class Node:
    """A host of the job: what its first rank says, and the slowest of its ranks' rates."""

    host: str
    versions: Mapping[str, str]
    device: str
    """What its ranks compute on."""
    num_ranks: int = 1
    address: str = ""
    free_gb: Mapping[str, float] = field(default_factory=dict)
    pictures: Mapping[str, int] = field(default_factory=dict)
    complaint: str | None = None
    gpus: Sequence[str] = ()
    multiply_gflops: float = 0.0
    copy_gb_per_second: float = 0.0
    link_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """To other hosts."""
    unreachable: Sequence[str] = ()
    """Hosts that it cannot connect to."""

    @property
    def best_link(self) -> float | None:
        """Bytes per second to the host it reaches fastest: a slow one is slow to all."""
        return max(self.link_bytes_per_second.values(), default=None)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    text: str
    hosts: tuple[str, ...] = ()
    """Those that the job should do without; none where it is not a node's fault."""


def judge(nodes: Sequence[Node]) -> list[Finding]:
    """All that is wrong; nothing where all nodes are fit."""
    return [
        *_shared(_addresses(nodes), nodes),
        *_reachability(nodes),
        *_differences(nodes),
        *_shared(_disks(nodes), nodes),
        *_data(nodes),
        *_slow_nodes(nodes),
        *_slow_links(nodes),
    ]


def _shared(found: list[Finding], nodes: Sequence[Node]) -> list[Finding]:
    """What all nodes have is no node's fault: another one would have it, too."""
    if {host for finding in found for host in finding.hosts} == {node.host for node in nodes}:
        return [replace(finding, hosts=()) for finding in found]
    return found


def remarks(nodes: Sequence[Node]) -> list[str]:
    """What a person may want to know, and what ends no job."""
    counts = next((dict(node.pictures) for node in nodes if node.pictures), {})
    if counts.get("classes") == IMAGENET["classes"] and counts != IMAGENET:
        shown = f"{counts['training']:,} training and {counts['validation']:,} validation pictures"
        return [f"1,000 classes, but {shown}: ImageNet has 1,281,167 and 50,000"]
    return []


def _addresses(nodes: Sequence[Node]) -> list[Finding]:
    if len(nodes) < 2:
        return []
    return [
        Finding(
            f"{node.host}: its address is {node.address}, which other nodes cannot reach: mend /etc/hosts there, or "
            "state --interface",
            (node.host,),
        )
        for node in nodes
        if node.address.startswith("127.")
    ]


def _reachability(nodes: Sequence[Node]) -> list[Finding]:
    """A node that most others cannot reach, or that cannot reach most, is at fault; else the pair is named."""
    found, blamed = [], set()
    for node in nodes:
        others = len(nodes) - 1
        not_reached_by = [other.host for other in nodes if node.host in other.unreachable]
        if others > 1 and max(len(not_reached_by), len(node.unreachable)) > others / 2:
            blamed.add(node.host)
            found.append(
                Finding(
                    f"{node.host}: {len(not_reached_by)} of {others} nodes cannot connect to {node.address}, and it "
                    f"cannot connect to {len(node.unreachable)}: look at its interface, cable and firewall",
                    (node.host,),
                )
            )
    for node in nodes:
        for other in node.unreachable:
            if not blamed & {node.host, other}:
                found.append(Finding(f"{node.host} cannot connect to {other}: a firewall or a route between them"))
    return found


def _differences(nodes: Sequence[Node]) -> list[Finding]:
    names = dict.fromkeys(name for node in nodes for name in node.versions)
    each: dict[str, dict[str, str]] = {name: {n.host: n.versions.get(name, "none") for n in nodes} for name in names}
    each["device"] = {node.host: node.device for node in nodes}
    found = []
    for name, values in each.items():
        found += [
            Finding(f"{host}: {name} {values[host]}, elsewhere {usual}: all nodes need the same", (host,))
            for host, usual in odd_ones(values)
        ]
    return found


def odd_ones(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(host, what most others have) of those that differ; of two equally large camps the first host's rules."""
    counts = Counter(map(str, values.values()))
    usual = max(counts, key=lambda value: counts[value])
    return [(host, usual) for host, value in values.items() if str(value) != usual]


def _disks(nodes: Sequence[Node]) -> list[Finding]:
    found = []
    for node in nodes:
        for folder, free in node.free_gb.items():
            least = LEAST_SHM_GB if folder == "/dev/shm" else LEAST_FREE_GB
            if free < least:
                remedy = "free some"
                if folder == "/dev/shm":
                    remedy += ", or start the container with a larger one (--shm-size 1g)"
                text = f"{node.host}: {folder} has {free:g} GB left, below {least:g}: {remedy}"
                found.append(Finding(text, (node.host,)))
    return found


def _data(nodes: Sequence[Node]) -> list[Finding]:
    bad = [Finding(f"{node.host}: {node.complaint}", (node.host,)) for node in nodes if node.complaint]
    if len(bad) == len(nodes):  # no node's fault
        return [Finding(str(nodes[0].complaint))]
    counts = {node.host: dict(node.pictures) for node in nodes if not node.complaint}
    odd = [
        Finding(f"{host}: sees other data, {counts[host]} instead of {usual}", (host,))
        for host, usual in odd_ones(counts)
    ]
    return bad + odd


def _slow_nodes(nodes: Sequence[Node]) -> list[Finding]:
    found = []
    for what, unit, rates in (
        ("multiplies matrices", "GFLOP/s", {node.host: node.multiply_gflops for node in nodes}),
        ("copies memory", "GB/s", {node.host: node.copy_gb_per_second for node in nodes}),
    ):
        usual = median_high(rates.values())
        for host, rate in rates.items():
            if rate < SLOW_SHARE * usual:
                found.append(
                    Finding(
                        f"{host}: {what} at {rate:,.1f} {unit}, the median node at {usual:,.1f}: look for other "
                        "processes, heat and power caps",
                        (host,),
                    )
                )
    return found


def _slow_links(nodes: Sequence[Node]) -> list[Finding]:
    best = {node.host: node.best_link for node in nodes}
    rates = {host: rate for host, rate in best.items() if rate is not None}
    if len(rates) < 3:  # the one link of two nodes has none beside it
        return []
    usual = median_high(rates.values())
    slow = {host for host, rate in rates.items() if rate < SLOW_LINK_SHARE * usual}
    found = [
        Finding(
            f"{host}: its link carries {bits(rates[host])}, the median node's {bits(usual)}: look at cable, port and "
            "interface",
            (host,),
        )
        for host in rates
        if host in slow
    ]
    for node in nodes:
        for other, rate in node.link_bytes_per_second.items():
            if node.host < other and not slow & {node.host, other} and rate < SLOW_LINK_SHARE * usual:
                found.append(Finding(f"{node.host} to {other}: {bits(rate)}, the median node's link {bits(usual)}"))
    return found


def bits(bytes_per_second: float) -> str:
    """1.25e8 -> '1.00 Gbit/s'."""
    return f"{8 * bytes_per_second / 1e9:.2f} Gbit/s"
