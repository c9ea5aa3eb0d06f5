"""Derive findings on nodes from the facts and measurements of all ranks. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bigbatch.trainer.preflight.checks import CHECKS
from bigbatch.trainer.preflight.node import Node, NodeFinding
from bigbatch.trainer.preflight.speeds import slow_clocks, slow_links, slow_nodes

LEAST_FREE_GB = 1.0
LEAST_SHM_GB = 0.5
IMAGENET = {"classes": 1000, "training": 1_281_167, "validation": 50_000}


def judge(nodes: Sequence[Node]) -> list[NodeFinding]:
    """List all findings; empty if all nodes are fit."""
    return [
        *shared(_addresses(nodes), nodes),
        *_reachability(nodes),
        *_troubles(nodes),
        *_differences(nodes),
        *_disks(nodes),
        *_data(nodes),
        *slow_nodes(nodes),
        *_clocks(nodes),
        *slow_links(nodes),
    ]


def shared(found: list[NodeFinding], nodes: Sequence[Node]) -> list[NodeFinding]:
    """Join findings of one kind: a finding on all of several nodes is no single node's fault."""
    if len(nodes) > 1 and {host for finding in found for host in finding.hosts} == {node.host for node in nodes}:
        return [replace(finding, hosts=()) for finding in found]
    return found


def remarks(nodes: Sequence[Node]) -> list[str]:
    """List remarks, which do not end the job."""
    found = []
    for check in CHECKS:
        told: dict[str, list[str]] = {}
        for node in nodes if not check.is_finding else ():
            for text in node.troubles.get(check.name, ()):
                told.setdefault(text, []).append(node.host)
        found += [f"{', '.join(hosts)}: {text}: {check.remedy}" for text, hosts in told.items()]
    return found + _counts(nodes)


def _counts(nodes: Sequence[Node]) -> list[str]:
    counts = next((dict(node.images) for node in nodes if node.images), {})
    if counts.get("classes") == IMAGENET["classes"] and counts != IMAGENET:
        shown = f"{counts['training']:,} training and {counts['validation']:,} validation images"
        return [f"1,000 classes, but {shown}: ImageNet has 1,281,167 and 50,000"]
    return []


def _troubles(nodes: Sequence[Node]) -> list[NodeFinding]:
    return [
        finding
        for check in CHECKS
        if check.is_finding
        for finding in shared(
            [
                NodeFinding(f"{node.host}: {text}: {check.remedy}", (node.host,))
                for node in nodes
                for text in node.troubles.get(check.name, ())
            ],
            nodes,
        )
    ]


def _addresses(nodes: Sequence[Node]) -> list[NodeFinding]:
    if len(nodes) < 2:
        return []
    return [
        NodeFinding(
            f"{node.host}: its address is {node.address}, which other nodes cannot reach: mend /etc/hosts there, or "
            "state --interface",
            (node.host,),
        )
        for node in nodes
        if node.address.startswith("127.")
    ]


def _reachability(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Blame a node that most others cannot reach, or that cannot reach most; else name the pair."""
    found, blamed = [], set()
    for node in nodes:
        others = len(nodes) - 1
        not_reached_by = [other.host for other in nodes if node.host in other.unreachable]
        # with two nodes, either may be at fault
        if others > 1 and max(len(not_reached_by), len(node.unreachable)) > others / 2:
            blamed.add(node.host)
            found.append(
                NodeFinding(
                    f"{node.host}: {len(not_reached_by)} of {others} nodes cannot connect to {node.address}, and it "
                    f"cannot connect to {len(node.unreachable)}: look at its interface, cable and firewall",
                    (node.host,),
                )
            )
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
    found = []
    for name, values in each.items():
        found += [
            NodeFinding(f"{host}: {name} {values[host]}, elsewhere {usual}: all nodes need the same", (host,))
            for host, usual in odd_ones(values)
        ]
    return found


def odd_ones(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List (host, value of the majority) of hosts that differ; in a tie the first host's value counts."""
    counts = Counter(map(str, values.values()))
    usual = max(counts, key=lambda value: counts[value])
    return [(host, usual) for host, value in values.items() if str(value) != usual]


def _disks(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Judge disks folder by folder: a shared folder says nothing about a local one."""
    folders = dict.fromkeys(folder for node in nodes for folder in (*node.free_gb, *node.disk_trouble))
    return [
        finding
        for folder in folders
        for found in (_silent_disks(nodes, folder), _full_disks(nodes, folder))
        for finding in shared(found, nodes)
    ]


def _silent_disks(nodes: Sequence[Node], folder: str) -> list[NodeFinding]:
    return [
        NodeFinding(f"{node.host}: {folder}: {node.disk_trouble[folder]}", (node.host,))
        for node in nodes
        if folder in node.disk_trouble
    ]


def _full_disks(nodes: Sequence[Node], folder: str) -> list[NodeFinding]:
    is_shm = folder == "/dev/shm"
    least = LEAST_SHM_GB if is_shm else LEAST_FREE_GB
    remedy = "free some" + (", or start the container with a larger one (--shm-size 1g)" if is_shm else "")
    return [
        NodeFinding(
            f"{node.host}: {folder} has {node.free_gb[folder]:g} GB left, below {least:g}: {remedy}", (node.host,)
        )
        for node in nodes
        if node.free_gb.get(folder, least) < least
    ]


def _clocks(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Judge clocks; a clock that is only slower than the others is its own host's fault."""
    return [
        finding
        for reasons, found in slow_clocks(nodes).items()
        for finding in (shared(found, nodes) if reasons else found)
    ]


def _data(nodes: Sequence[Node]) -> list[NodeFinding]:
    bad = [NodeFinding(f"{node.host}: {node.complaint}", (node.host,)) for node in nodes if node.complaint]
    if len(bad) == len(nodes):  # no node's fault
        return [NodeFinding(str(nodes[0].complaint))]
    counts = {node.host: dict(node.images) for node in nodes if not node.complaint}
    odd = [
        NodeFinding(f"{host}: sees other data, {counts[host]} instead of {usual}", (host,))
        for host, usual in odd_ones(counts)
    ]
    return bad + odd
