"""Nodes as preflight reports them, made by hand, and what is said of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bigbatch.tools.preflight.findings import Node, find_faults
from bigbatch.tools.preflight.meeting import NodeAddress

GBIT = 1e9 / 8


def node(name: str, **changes: Any) -> Node:
    base = Node(
        host=name,
        versions={"torch": "2.14.1", "bigbatch": "0.1.0 abc"},
        device="NVIDIA H100",
        address="10.0.0.1",
        free_gb={"/dev/shm": 60.0, "runs": 500.0},
        images={"classes": 1000, "training": 1_281_167, "validation": 50_000},
        multiply_gflops=700_000.0,
        copy_gb_per_second=1500.0,
    )
    return replace(base, **changes)


def cluster(count: int = 4, *, rate: Callable[[int, int], float] = lambda a, b: 100 * GBIT, **odd: Any) -> list[Node]:
    """n0, n1 ... with links; changes of n1 are odd."""
    nodes = [
        node(f"n{i}", link_bytes_per_second={f"n{j}": rate(i, j) for j in range(count) if j != i}) for i in range(count)
    ]
    nodes[1] = replace(nodes[1], **odd)
    return nodes


def place(number: int, **changes: Any) -> NodeAddress:
    return replace(NodeAddress(8 * number, f"n{number}", "10.0.0.1", 1, f"m{number}", 8, None), **changes)


def texts(nodes: list[Node]) -> list[str]:
    return [finding.text for finding in find_faults(nodes)]


def blamed(nodes: list[Node]) -> list[str]:
    return sorted({host for finding in find_faults(nodes) for host in finding.hosts})
