"""Find nodes that are slower than the others. Pure."""

from collections.abc import Sequence
from statistics import median_high

from bigbatch.trainer.preflight.node import Node, NodeFinding

SLOW_SHARE = 0.7
"""Share of the median node's rate below which a node is slow: below the noise between equal nodes."""
SLOW_LINK_SHARE = 0.6


def slow_nodes(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Find those that compute or copy far below the median node."""
    found = []
    for what, unit, rates in (
        ("multiplies matrices", "GFLOP/s", {node.host: node.multiply_gflops for node in nodes}),
        ("copies memory", "GB/s", {node.host: node.copy_gb_per_second for node in nodes}),
    ):
        usual = median_high(rates.values())
        for host, rate in rates.items():
            if rate < SLOW_SHARE * usual:
                found.append(
                    NodeFinding(
                        f"{host}: {what} at {rate:,.1f} {unit}, the median node at {usual:,.1f}: look for other "
                        "processes, heat and power caps",
                        (host,),
                    )
                )
    return found


def slow_clocks(nodes: Sequence[Node]) -> dict[tuple[str, ...], list[NodeFinding]]:
    """Find GPUs that the hardware slows down under load, by reason; under (): those far below the median clock."""
    clocks = [(node.host, rank, clock) for node in nodes for rank, clock in node.clocks.items()]
    found: dict[tuple[str, ...], list[NodeFinding]] = {}
    usual = median_high([clock.mhz for *_, clock in clocks]) if clocks else 0.0
    for host, rank, clock in clocks:
        if clock.slowed_by or clock.mhz < SLOW_SHARE * usual:
            why = f", slowed by {' and '.join(clock.slowed_by)}" if clock.slowed_by else ""
            found.setdefault(clock.slowed_by, []).append(
                NodeFinding(
                    f"{host}: the GPU of rank {rank} works at {clock.mhz:,.0f} MHz{why}, the median one at "
                    f"{usual:,.0f}: look at nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE there",
                    (host,),
                )
            )
    return found


def slow_links(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Find nodes with a best pair far below the median node's; else single pairs."""
    best = {node.host: node.best_link for node in nodes}
    rates = {host: rate for host, rate in best.items() if rate is not None}
    if len(rates) < 3:  # the one link of two nodes has none beside it
        return []
    usual = median_high(rates.values())
    slow = {host for host, rate in rates.items() if rate < SLOW_LINK_SHARE * usual}
    found = [
        NodeFinding(
            f"{host}: its link carries {bits(rates[host])}, the median node's {bits(usual)}: look at cable, port and "
            "interface",
            (host,),
        )
        for host in rates
        if host in slow
    ]
    for node in nodes:
        for other, rate in node.link_bytes_per_second.items():
            # each pair once, from the host that sorts first
            if node.host < other and not slow & {node.host, other} and rate < SLOW_LINK_SHARE * usual:
                found.append(NodeFinding(f"{node.host} to {other}: {bits(rate)}, the median node's link {bits(usual)}"))
    return found


def bits(bytes_per_second: float) -> str:
    """Show 1.25e8 as '1.00 Gbit/s'."""
    return f"{8 * bytes_per_second / 1e9:.2f} Gbit/s"
